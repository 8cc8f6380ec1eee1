"""Connections to training frameworks: one module per framework, which imports it.

    transformers    MetricsCallback for its Trainer
    axolotl         SecondOrderPlugin

`import second_order` imports none of them.
"""
