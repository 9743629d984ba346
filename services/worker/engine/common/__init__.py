"""Code that the prefill and decode sides of an engine process share: the conversion of request parameters,
and the clock of steps. Imported by the other folders of `services/worker/engine`, none of which it
imports."""
