"""The demo model's data, training and evaluation. Its result is in `baton/demo_model`. Imported by its tests
alone; of the product it imports `baton.client`, to evaluate the model as served.
"""
