"""From second moments to effect: options, spans, factor, oblique projection; free of `Moments`."""
