"""What server, router and simulator share: policies and models. No SGLang, no torch, no clock."""
