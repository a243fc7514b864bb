"""From logits to tokens: rules, penalties, grammars, draws, logprobs."""
