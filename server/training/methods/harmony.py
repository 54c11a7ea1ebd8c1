"""HARMONY: extractors that learn to be personalised, and a server that aligns their features.
docs/methods/harmony.md; the paper's 3.1-3.5.

    client      adapt (f, h) to B1 and to B2;  z1 = f1[:K](x2), z2 = f2(x1)           (Eq. 3-4)
                I = [y1 == y2];  sends z2, z1, K, I
                (edge_sdk.training.client.adaptation)
    server      s2 = neck(z2), s1 = neck(z1) from the stage after K                   (Eq. 6)
                (server.training.methods.ask_clients)
                returns the logits of s2
    client      Ls = CE(logits, y1);  returns dLs by the logits
    server      trunk -= lr * ((1 - g) * dLs + dCSA(s1/|s1|, s2/|s2|, I))              (Eq. 1-2, 7)
                stopped at z1, z2
                returns dLs by z2
    client      (f, h) -= lr * (g * dLc + (1 - g) * dLs), taken at (f2, h2)
    aggregate   f, h block by block and the server's copies, by n_k; lambda = 0        (Eq. 2)
    afterwards  every client adapts (f, h) to all its data                            (Eq. 5)

Labels are not sent, but the server can derive them: the gradient by the logits is negative at the
label alone. I, which says whether two labels are equal, travels with it, and the change of an exit
head tells the server which classes a client has. The counter-measures do not make labels private
either. Share of 300 labels of clients of two classes that are read, where guessing gets 53 %
(tests/training/methods/harmony/test_labels.py):

    noise                        0     1    10   100  1000    head on the client
    by likelihood, %           100    95    73    60    55    -
    by direction, %            100    95    73    58    54    100

In that test's task of four classes, the accuracy is 98 % without noise and 88 % at noise 1; from 10
on nothing is learnt.
"""

from __future__ import annotations

from typing import Final

from edge_sdk.training.protocol.client_part import ClientPart, LastLayer, MetaAdaptation
from server.training.methods.ask_clients import ask_clients
from server.training.methods.formulas.contrastive import Alignment
from server.training.methods.method import Method

# g as stated in the paper. Weight and margin of the alignment are ours, and so is the length of the
# embeddings: as they are, `cnn6` on Fashion-MNIST diverged at the lower of the paper's two rates
# (docs/decisions/0083-alignment-at-length-1.md).
EXIT_SHARE: Final = 0.5
ALIGN_WEIGHT: Final = 1.0
MARGIN: Final = 1.0
_META: Final = MetaAdaptation()  # the source of the defaults


def harmony(
    *,
    exit_share: float = EXIT_SHARE,
    adapt_steps: int = _META.steps,
    adapt_rate: float = _META.rate,
    align_weight: float = ALIGN_WEIGHT,
    margin: float = MARGIN,
    normalise_embeddings: bool = True,
    stochastic_depth: bool = _META.early,
    personal_share: float = 0.0,
    finetune_steps: int | None = None,
    head: LastLayer = _META.head,
    noise: float = _META.noise,
) -> Method:
    """The method, or one of the ablations of its Fig. 4.

    Fig. 4's are align_weight 0 (no CSA), stochastic_depth false, and for SplitGP with CSA
    adapt_steps 0, stochastic_depth false, personal_share 0.9.

    Args:
        exit_share: gamma. adapt_steps, adapt_rate: M and its learning rate.
        align_weight, margin: of CSA; weight 0 leaves it out, and the second view is not sent.
        normalise_embeddings: whether CSA compares embeddings at length 1, not as they are, as
            Eq. 7 is printed.
        personal_share: lambda; the method's own is 0.
        finetune_steps: of the personalisation afterwards, at `adapt_rate`; M where None.
        head, noise: counter-measures against reading labels in returned gradients: `client`
            keeps the last layer on the client, unshared; noise is drawn around what it returns.
    """
    meta = MetaAdaptation(
        steps=adapt_steps,
        rate=adapt_rate,
        early=stochastic_depth,
        head=head,
        noise=noise,
    )
    part = ClientPart(
        exit_head=True,
        fusion="fixed",
        exit_share=exit_share,
        personal_share=personal_share,
        meta=meta,
        views=align_weight > 0,
    )
    return Method(
        "harmony",
        labels="derivable",
        client=part,
        server_step=ask_clients(1 - exit_share, early_views=True),
        trunk="own",
        align=Alignment(align_weight, margin, normalise_embeddings),
        asks=("logits", "embeddings"),
        share_exits=True,
        finetune_steps=adapt_steps if finetune_steps is None else finetune_steps,
        finetune_rate=adapt_rate,
    )
