"""An hour of mixed load: does any process grow?"""
