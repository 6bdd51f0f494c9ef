"""From the logits of one step to its tokens, on rank 0, in vLLM's order of operations.

    logits_RV ──► logprobs.py    raw log-probabilities, before anything below
        │
        ▼ plan.py: what the parameters of each sequence ask for
    edits.py                     1. allowed_token_ids  2. bad_words  3. min_tokens  4. logit_bias
    processors.py                5. logits_processors, in their order
    penalties.py                 6. repetition, then frequency, then presence
    grammars.py                  7. structured_output: nothing before it brings a token back
        │
        ▼
    choice.py                    greedy rows end here, with the most likely token
                                 8. temperature  9. min_p  10. top_k  11. top_p
    random_numbers.py            the token at which the cumulated probability passes a number

A row's result depends on its own logits, parameters and tokens alone: not on its neighbours, on its
place in the batch, or on what was sampled before it. Equal logits rank by id, the lowest first,
wherever an order is needed: so top_k=1 is greedy, and "keep this many" keeps that many.

Shapes: R rows (sequences), V vocabulary, K kept candidates, N listed ids.
"""
