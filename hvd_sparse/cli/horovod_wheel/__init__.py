"""Parts of `hvd-sparse build-horovod`: options, needs, source, compilation, cache key, cache."""

HOROVOD_VERSION = "0.28.1"

# Raise it when a change here changes the wheel: cached wheels of older recipes are then no longer found.
RECIPE_VERSION = 1
