"""Make my DeepSeek-V4 layer invariant: a small model of transformers, before and after `samebits.patch`.

    python examples/patch_deepseek_v4.py

The same from a terminal:

    samebits invariance examples/patch_deepseek_v4.py:stock    # names a hyper-connection: its rows depend on the batch
    samebits invariance examples/patch_deepseek_v4.py:patched  # names none, and no norm
"""

from typing import Any

from torch import nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RMSNorm

import samebits
from samebits.models.deepseek_v4.subject import SMALL, causal_lm
from samebits.verify.invariance import show

Made = tuple[nn.Module, dict[str, Any]]


def model() -> Made:
    """Sixteen sequences of one token, as in a step of decoding. Yours: DeepseekV4ForCausalLM.from_pretrained(...)."""
    made = causal_lm(batch=16, sequence=1, config=SMALL)  # one layer, BF16, random weights
    return made.model, {"input_ids": made.ids, "use_cache": False}


def stock() -> Made:
    """As the class has it. transformers 5.17 needs the cast to run in BF16 at all: its norms return FP32."""
    found, inputs = model()
    for member in found.modules():
        if isinstance(member, DeepseekV4RMSNorm):
            member.register_forward_hook(lambda _, args, output: output.to(args[0].dtype))
    return found, inputs


def patched() -> Made:
    found, inputs = model()
    samebits.patch(found, contracts="published")
    return found, inputs


def main() -> None:
    for make in (stock, patched):
        found, inputs = make()
        print(f"\n{make.__name__}:")
        with samebits.policy("silent"):  # no word about the reference backend, which is slow
            print("\n".join(show.lines(samebits.invariance(found, inputs))))
    sites = samebits.patched(found).hits
    print(f"our operators ran at {sum(count > 0 for count in sites.values())} call sites")
    print("not ours, and may vary on another machine: the matrix products of attention, router and experts")


if __name__ == "__main__":
    main()
