"""Elements that a decoder layer holds which runs in tiles as a whole (``patching.tiled_layer``).

Letters are those of ``memory.layer_elements``: D model width, Q and K total width of query and of key heads, F
inner width of the MLP. A layer keeps its input. Its backward pass holds, for each token:

    dy, dr                   2 D       gradients of the output and of the residual
    a, da                    2 Q       attention's output and its gradient; when a group of heads is
                                       done, its share becomes that of
    dq, dk, dv               Q + 2 K   gradients of queries, keys and values
    rows                     an fp32 value for each query head (FlashAttention)
    gathered keys, values    2 K       where answers share prompts; freed with the group

and in addition the larger one of

    a tile of rows           5 F + 5 D + Q  for each of its rows, at the gated unit's backward pass
    a group of heads         6 q + 4 k      for each token: queries, keys and values, gradients of
                                            queries, an fp32 accumulator of them, gradients of keys
                                            and values for each query head, and their sums for each
                                            key head; q and k are the group's share of Q and K; where
                                            keys are gathered 2 k more, the gradients of what they
                                            are gathered from

Of the groups the first one is the largest moment where a and da are more than dq, dk and dv, else the last
one, which holds 7 q + 2 k beside Q + 2 K. Where queries, keys and values of all heads are made at once,
as those of one group are, they are there with a and da: 3 Q + 2 K and, for a group, 5 q + 2 k.
"""

from __future__ import annotations

from dataclasses import dataclass

from chronicals.memory.recompute import heads_at_a_time
from chronicals.model_shape import ModelShape


@dataclass(frozen=True)
class LayerTiles:
    """Settings by which decoder layers run in tiles as a whole.

    Attributes:
        rows: rows of a tile.
        together: number of key heads that must attend in one call, or a divisor of it.
        sums: bytes of the gradients of a layer's weights as they are summed over tiles; 0 if only
            adapters are trained.
        down: bytes of the gradient of the down product's weight, which one tile returns.
        at_once: queries, keys and values of all heads are made at once, not by groups of heads.
    """

    rows: int
    together: int = 1
    sums: int = 0
    down: int = 0
    at_once: bool = False


@dataclass(frozen=True)
class TiledElements:
    """Elements of one layer's backward pass.

    Attributes:
        of_token: for each token, without those of a tile or of a group.
        of_group: for each token, of a group of heads.
        of_row: for each row of a tile.
        of_result: for each token, what attention gives and FlashAttention's values of rows; counted
            in ``of_token``.
    """

    of_token: int
    of_group: int
    of_row: int
    of_result: int

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        tokens: int,
        tiles: LayerTiles,
        element: int,
        columns: int,
        gathers_keys: bool = False,
    ) -> TiledElements:
        """Return the elements of a model's layers.

        Args:
            shape: of the model.
            tokens: tokens of a pack.
            tiles: how its layers run.
            element: bytes of an element.
            columns: columns of adapters behind the inputs of a tile's products.
            gathers_keys: answers share prompts, so keys and values of a prompt and an answer are
                gathered.
        """
        heads = shape.heads or 1
        key_heads = shape.kv_heads or heads
        head_dim = shape.head_dim or shape.width // heads
        queries = heads * head_dim
        keys = key_heads * head_dim
        share = heads_at_a_time(tokens, heads, key_heads, tiles.together) / key_heads
        of_heads = heads * 4 // element
        gathered = 2 * keys * gathers_keys
        results = 2 * queries + gathered
        gradients = queries + 2 * keys
        if tiles.at_once or share == 1:
            held = results + gradients
            of_group = 5 * queries + 2 * keys + gathered
        elif results >= gradients:
            held = results
            of_group = 6 * queries + 4 * keys + gathered
        else:
            held = gradients
            of_group = 7 * queries + 2 * keys
        return cls(
            of_token=2 * shape.width + held + of_heads,
            of_group=int(of_group * share) + of_heads,
            of_row=5 * shape.inner + 5 * shape.width + queries + columns,
            of_result=queries + of_heads,
        )

    def bytes(self, tokens: int, tiles: LayerTiles, element: int) -> int:
        """Return the bytes of the backward pass at its largest moment."""
        rows = min(tiles.rows, tokens)
        of_tile = rows * self.of_row * element + tiles.down
        of_group = tokens * self.of_group * element
        return tokens * self.of_token * element + max(of_tile, of_group) + tiles.sums
