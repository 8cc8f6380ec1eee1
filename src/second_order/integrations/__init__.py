"""Connections to training frameworks: one module per framework, which imports it.

    transformers    MetricsCallback for its Trainer
    timm            register, so that create_optimizer_v2 makes KAISA and others by name
    axolotl         SecondOrderPlugin
    torchtitan      SecondOrderOptimizersContainer

`import second_order` imports none of them.
"""
