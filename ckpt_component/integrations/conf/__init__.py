"""Configs for apps of other frameworks: `hydra.searchpath: [pkg://ckpt_component.integrations.conf]`.

They are not on the search path of every app, because an app's own group `callbacks` may be of another kind.
"""
