"""Connections to training frameworks, in a module for each, which imports that framework.

    transformers    MetricsCallback for its Trainer
    timm            register, after which create_optimizer_v2 knows KAISA and others by name
    axolotl         SecondOrderPlugin
    torchtitan      SecondOrderOptimizersContainer

`import second_order` imports none of them.
"""
