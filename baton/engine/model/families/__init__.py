"""One module for each kind of model: how its `config.json` becomes a `ModelConfig`. `registry` lists the
architectures, `decoder` has what families share. Imported by what loads a model. Free of torch."""
