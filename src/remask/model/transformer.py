"""The transformer. It executes any step batch, and knows no cache policy and no model by name."""

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Self, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from remask.model.arithmetic import Arithmetic, query_growth, rope, rotate
from remask.model.attention import Attention, Sink, SizedAttention, attend_near
from remask.model.attention_torch import TorchAttention
from remask.model.config import ModelConfig
from remask.model.graphs import Graphs
from remask.model.mixture import Routes, feed, route
from remask.model.pool import Pool, cpu_kv_dtype
from remask.model.quantised import QuantisedMatrix, UnroundedArithmetic
from remask.model.ranks import Ranks
from remask.model.stage import NO_ADAPTERS, AdapterRows, Partial, Pick, Rows, Signals, Stage, StepBatch
from remask.model.weights import LayerWeights, MixtureWeights, Weights
from remask.model.work_list import WorkList

if TYPE_CHECKING:
    from remask.model.layer_triton import TritonLayer

COSINE_EPS = 1e-8  # of PyTorch's cosine similarity
Pair: TypeAlias = tuple[Tensor, Tensor]


class Transformer:
    """Pre-norm, RoPE in the half-split layout, an MLP with or without a gate or experts, grouped K/V heads.

    With several `ranks` it computes the heads, columns, experts and tokens of one rank, and takes part in sums over all
    of them. Hidden states are whole, and the same bits on every rank.

    Attributes:
        config: the whole model's shape.
        part: the shape that this rank computes with, in layers that see everything.
        parts: that, and the shape of layers that slide if there are some.
        kernels: what computes between matrix products; None: PyTorch's own operations.
        graphs: what repeats layers in which all rows are computed; None: they are launched one operation after another.
    """

    graphs: Graphs | None = None

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        attention: Attention | None = None,
        arithmetic: Arithmetic | None = None,
        ranks: Ranks | None = None,
        kernels: "TritonLayer | None" = None,
    ) -> None:
        self.config, self.weights, self.arithmetic = config, weights, arithmetic or Arithmetic()
        self.ranks = ranks or Ranks()
        self.part = self.ranks.shard.part(config)
        self.parts = tuple(map(self.ranks.shard.part, config.shapes))
        self.attention, self.kernels = attention or TorchAttention(config.score_cap), kernels
        self.turns = tuple(rope(shape, weights.embed.dtype, weights.embed.device) for shape in config.shapes)
        self.slides = tuple(map(config.slides, range(config.layers)))
        self.growth = query_growth(config, weights.embed.dtype, weights.embed.device)
        self._zeros: Sink | None = None
        if config.sink == "zero":
            zeros = weights.embed.new_zeros(self.part.kv_heads, self.part.head_dim)
            self._zeros = zeros, zeros
        scale = torch.tensor(1.0 if config.embed_scale is None else config.embed_scale)
        self.activation = config.activation
        self.embed_scale = float(scale.to(weights.embed.dtype))  # rounded as the embedding is, as in transformers

    def with_attention(self, attention: Attention) -> Self:
        """The same weights, with attention computed by `attention`, and without graphs."""
        other = copy(self)
        other.attention, other.graphs = attention, None
        return other

    def with_graphs(self, graphs: Graphs) -> Self:
        """The same model, whose layers `graphs` repeats."""
        other = copy(self)
        other.graphs = graphs
        return other

    def unrounded(self) -> Self:
        """The same weights, whose products do not round rows, without graphs; the model itself if none is quantized."""
        if not self.quantised:
            return self
        other = copy(self)
        other.arithmetic, other.graphs = UnroundedArithmetic(), None
        return other

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.weights.embed.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights that are not quantized, of hidden states and of boundary states."""
        return self.weights.embed.dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of K/V: that of the model. On a CPU bfloat16 beside quantized weights, where it would be wider."""
        if self.device.type != "cpu" or isinstance(self.attention, SizedAttention):
            return self.dtype
        return cpu_kv_dtype(self.dtype, self.quantised)

    @property
    def quantised(self) -> bool:
        """Whether the matrices are quantized."""
        return any(isinstance(layer.qkv, QuantisedMatrix) for layer in self.weights.layers)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, pool: Pool) -> Tensor:
        """Run all stages. K/V are written to `pool`, and hidden states to the tensors that the stages' saves name.

        Returns the final norm's output at the predicted rows, [M, D]. The host does not wait for the device.
        """
        h = self.embed(batch.tokens)
        if batch.signals is not None:
            h = self.told(h, batch.signals, pool)
        for stage in batch.stages:
            h = self.run(stage, h, pool)
        return self.leave(h.index_select(0, batch.predict))

    def embed(self, tokens: Tensor) -> Tensor:
        """The embedding of `tokens` [N] as it enters the first layer, [N, D]."""
        h = F.embedding(tokens, self.weights.embed)
        if self.embed_scale != 1:
            h = h * self.embed_scale
        return h if self.weights.embed_norm is None else self.norm(h, self.weights.embed_norm)

    @torch.inference_mode()
    def expected(self, chances: Tensor) -> Tensor:
        """The expected embedding [M, D] of rows with the probabilities `chances` [M, V], of the tokens of this rank."""
        tokens = self.ranks.shard.share(self.config.vocab)
        embed = self.weights.embed[tokens.start : tokens.stop]
        return self.ranks.sum(self.arithmetic.linear(chances.to(embed.dtype), embed.T)) * self.embed_scale

    @torch.inference_mode()
    def told(self, h: Tensor, signals: Signals, pool: Pool) -> Tensor:
        """Embedded rows [N, D] once those of `signals` have taken in what the pass before predicted of them."""
        w, c, rows = self.weights.signal, self.config, signals.rows
        assert w is not None
        assert pool.signals is not None
        gate, up = self.arithmetic.linear(self.norm(pool.signals[signals.slots], w.norm), w.gate_up).chunk(2, dim=-1)
        inner = self.arithmetic.activate_(gate, self.activation).mul_(up)
        added = h[rows] + self.ranks.sum(self.arithmetic.linear(inner, w.down))
        return h.index_copy(0, rows, F.rms_norm(added, (c.hidden,), None, c.norm_eps))

    def run(self, stage: Stage, h: Tensor, pool: Pool) -> Tensor:
        """The output of `stage`, [N, D]. `h` is the output of the stage before, and may be overwritten."""
        if stage.outputs or stage.partial is not None:
            pool.keep_outputs()
        h = _enter(stage, h)
        if self.graphs is not None and self.graphs.serve(stage, pool):
            return self.graphs.run(self, stage, h)
        partial, at = stage.partial, stage.positions
        places = (
            stage.slots if self.kernels is None or partial is not None else self._places(stage.slots, stage, len(h))
        )
        # On a CPU `index_select` takes a third of the time of an index in brackets.
        growth = None if self.growth is None else self.growth.index_select(0, at)
        rest = places, stage.written, stage.outputs, stage.adapters, growth, stage.roles
        by_kind = [Rows(cos.index_select(0, at), sin.index_select(0, at), *rest) for cos, sin in self.turns]
        for layer in stage.layers:
            slides = self.slides[layer]
            rows, work = by_kind[slides], stage.near if slides else stage.work
            if partial is not None:
                h = self._partial_layer(h, layer, stage, pool, (rows.cos, rows.sin))
                continue
            assert work is not None
            attended = self.attend(self.project(h, layer, rows, pool), layer, work, pool)
            h = self.finish(h, attended, layer, rows, pool)
        return h

    def project(self, h: Tensor, layer: int, rows: Rows, pool: Pool) -> Tensor:
        """The first part of a layer that is entered as `h` [N, D]: the queries of `rows`, [N, heads, Dh].

        K/V of the rows that are written are put into their slots.
        """
        w, c = self.weights.layers[layer], self.parts[self.slides[layer]]
        x, turns = self.norm(h, w.attn_norm), (rows.cos, rows.sin)
        heads = c.heads + 2 * c.kv_heads
        if self.kernels is not None:
            qkv = self._linear(x, w, "qkv", rows.adapters, bias=w.qkv_bias)
            q = self.kernels.heads(qkv, w, rows.cos, rows.sin, pool.k[layer], pool.v[layer], rows.slots)
            return q if rows.growth is None else q.mul_(rows.growth)
        if rows.written is None and not self.arithmetic.invariant:
            turned, v = self._project(x, layer, range(heads), turns, rows.adapters)
            q, k = turned[:, : c.heads], turned[:, c.heads :]
        else:
            # Two products where one would do, if bits must not depend on what other canvases leave out.
            q, _ = self._project(x, layer, range(c.heads), turns, rows.adapters)
            adapters = rows.adapters
            if rows.written is not None:
                x, turns = x[rows.written], (rows.cos[rows.written], rows.sin[rows.written])
                adapters = adapters.among(rows.written)
            k, v = self._project(x, layer, range(c.heads, heads), turns, adapters)
        pool.k[layer].index_copy_(0, rows.slots, k.to(pool.k[layer].dtype))
        pool.v[layer].index_copy_(0, rows.slots, v.to(pool.v[layer].dtype))
        return q if rows.growth is None else q.mul_(rows.growth)

    def attend(self, q: Tensor, layer: int, work: WorkList, pool: Pool) -> Tensor:
        """What the queries `q` [N, heads, Dh] find, [N, heads * Dh]."""
        return self.attention(q, pool.k[layer], pool.v[layer], work, self.sink(layer))

    def finish(self, h: Tensor, attended: Tensor, layer: int, rows: Rows, pool: Pool) -> Tensor:
        """The rest of a layer, after attention: `h` [N, D] with what is added to it, in place."""
        w = self.weights.layers[layer]
        cache_attended, cache_fed = pool.outputs[layer] if rows.outputs else (None, None)
        attended = self.ranks.sum(self._linear(attended, w, "out", rows.adapters))
        x = self._added(h, self.norm(attended, w.attn_post), w.ffn_norm, cache_attended, rows)
        fed = self._feed(h, x, w, rows.adapters)
        h = self._added(h, self.norm(fed, w.ffn_post), None, cache_fed, rows)
        if w.scale is not None:
            h *= w.scale[0] if rows.roles is None else w.scale.index_select(0, rows.roles)[:, None]
        return h

    def sink(self, layer: int) -> Sink | None:
        """The key and value that every row attends to in `layer`, where the model has some."""
        w = self.weights.layers[layer]
        return self._zeros if w.sink_k is None or w.sink_v is None else (w.sink_k, w.sink_v)

    def stillness(self, stage: Stage, h: Tensor, pool: Pool, rows: Tensor, slots: Tensor) -> Tensor:
        """Cosine similarity of the V that `rows` of the next `stage` would write in its first layer to that in `slots`.

        `h` is the output of the stage before; `rows` are int64 [N], among the rows of `stage`. Returns float32 [N].
        """
        layer, h = stage.layers.start, _enter(stage, h)
        turns, adapters = self.turned_by(layer, stage.positions[rows]), stage.adapters.among(rows)
        return self._compared(h[rows], layer, pool.v[layer], slots, False, turns, adapters)[1]

    def leave(self, h: Tensor) -> Tensor:
        """What the output matrix reads: the final norm of the last layer's output, and what a family has behind it."""
        w, h = self.weights, self.norm(h, self.weights.norm)
        if w.head_dense is None:
            return h
        return self.norm(self.arithmetic.activate_(self.arithmetic.linear(h, w.head_dense), "gelu"), w.head_norm)

    def norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """The norm of the rows of `x`; without a weight `x` itself."""
        if weight is None:
            return x
        if self.kernels is not None:
            return self.kernels.norm(x, weight)
        norm = F.layer_norm if self.config.norm == "layer" else F.rms_norm
        return norm(x, weight.shape, weight, eps=self.config.norm_eps)

    def turned_by(self, layer: int, positions: Tensor) -> Pair:
        """cos and sin of RoPE in `layer` at `positions` [N], [N, 1, R / 2]."""
        cos, sin = self.turns[self.slides[layer]]
        return cos[positions], sin[positions]

    def queries(self, h: Tensor, layer: int, positions: Tensor, adapters: AdapterRows = NO_ADAPTERS) -> Tensor:
        """This rank's queries after RoPE, [N, heads, Dh], of rows at `positions` that enter `layer` as `h` [N, D]."""
        x, heads = self.norm(h, self.weights.layers[layer].attn_norm), range(self.part.heads)
        q, _ = self._project(x, layer, heads, self.turned_by(layer, positions), adapters)
        return q if self.growth is None else q * self.growth[positions]

    def route(self, x: Tensor, w: MixtureWeights) -> Routes:
        """The experts that compute the normed rows `x` [N, D] of a layer with the mixture `w`, and their weights."""
        assert self.config.mixture is not None
        return route(x, self.config.mixture.router, self.config.mixture.active, w, self.arithmetic)

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Logits [M, V] of final hidden states [M, D], in their dtype: of the tokens that this rank holds."""
        logits, cap = self.arithmetic.linear(hidden, self.weights.head, self.weights.head_bias), self.config.logit_cap
        if cap is None:
            return logits
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(cap).tanh_().mul_(cap)

    def _added(self, h: Tensor, new: Tensor, weight: Tensor | None, cache: Tensor | None, rows: Rows) -> Tensor:
        """`h` after `new` was added to it in place, or its norm with `weight`. `new` is cached in `cache`."""
        if self.kernels is not None:
            return self.kernels.add(h, new, weight, cache, rows.slots)
        if cache is not None:
            cache.index_copy_(0, rows.slots, new if rows.written is None else new[rows.written])
        h += new
        return h if weight is None else self.norm(h, weight)

    def _places(self, slots: Tensor, stage: Stage, rows: int) -> Tensor:
        """`slots` [W] of the rows that the stage writes, for kernels: of all `rows` computed rows, and -1 for none."""
        if stage.written is None:
            return slots
        return slots.new_full((rows,), -1).index_copy_(0, stage.written, slots)

    def _partial_layer(self, h: Tensor, layer: int, stage: Stage, pool: Pool, turns: Pair) -> Tensor:
        """One layer in which some rows are computed, and the others add their cached outputs."""
        assert stage.partial is not None
        w, part = self.weights.layers[layer], stage.partial
        computed = part.computed
        for pick in part.picks:
            if (pick.phase + layer - stage.layers.start) % pick.every:
                chosen = _least(~pool.picked[part.slots[pick.rows]], pick)
            else:
                chosen = self._choose(h, layer, stage, pick, pool, turns)
            computed = computed.index_copy(0, pick.target, chosen)
        slots = part.slots[computed]
        written = slots if stage.written is None else slots[stage.written]
        places = written if self.kernels is None else self._places(written, stage, len(computed))
        adapters = stage.adapters.among(computed)
        growth = None if self.growth is None else self.growth[stage.positions[computed]]
        cos, sin = turns
        rows = Rows(cos[computed], sin[computed], places, stage.written, True, adapters, growth)
        q = self.project(h[computed], layer, rows, pool)
        work = stage.near if self.slides[layer] else stage.work
        if work is None:  # rows were chosen, and the host does not know which
            attended = self._attend_near(q, layer, part, computed, pool)
        else:
            attended = self.attend(q, layer, work, pool)
        attended = self.norm(self.ranks.sum(self._linear(attended, w, "out", adapters)), w.attn_post)
        h += _outputs(pool.outputs[layer][0], attended, computed, part.slots, stage.written)
        x = h[computed]
        fed = self.norm(self._feed(x, self.norm(x, w.ffn_norm), w, adapters), w.ffn_post)
        h += _outputs(pool.outputs[layer][1], fed, computed, part.slots, stage.written)
        return h

    def _attend_near(self, q: Tensor, layer: int, part: Partial, computed: Tensor, pool: Pool) -> Tensor:
        """As `attend`, in a layer that slides, of the rows `computed` of a stage."""
        near, reach = part.neighbours, self.config.window(layer)
        assert near is not None
        assert reach is not None
        near = replace(near, places=near.places.index_select(1, computed))
        return attend_near(q, pool.k[layer], pool.v[layer], near, reach, self.sink(layer), self.config.score_cap)

    def _choose(self, h: Tensor, layer: int, stage: Stage, pick: Pick, pool: Pool, turns: Pair) -> Tensor:
        """The rows of `pick` whose V (or K) changed most, int64 [S]. V (or K) is written for all rows of `pick`.

        `h` [N, D] are the rows of `stage`, with `turns` of RoPE. The choice stays on the device, as the number of rows
        chosen of each canvas is known before.
        """
        assert stage.partial is not None
        slots, adapters = stage.partial.slots, stage.adapters.among(pick.rows)
        places = slots[pick.rows]
        cache = pool.k[layer] if pick.keys else pool.v[layer]
        turns = turns[0][pick.rows], turns[1][pick.rows]
        new, similarity = self._compared(h[pick.rows], layer, cache, places, pick.keys, turns, adapters)
        chosen = _least(similarity, pick)
        cache.index_copy_(0, places, new.to(cache.dtype))
        if pick.every > 1:
            pool.picked.index_fill_(0, places, False).index_fill_(0, slots[chosen], True)
        return chosen

    def _compared(
        self, h: Tensor, layer: int, cache: Tensor, slots: Tensor, keys: bool, turns: Pair, adapters: AdapterRows
    ) -> Pair:
        """V (or with `keys` K) of rows that enter a layer as `h` [N, D], and its similarity to that in `slots`, [N]."""
        c = self.parts[self.slides[layer]]
        first = c.heads if keys else c.heads + c.kv_heads
        x = self.norm(h, self.weights.layers[layer].attn_norm)
        new = self._project(x, layer, range(first, first + c.kv_heads), turns, adapters)[0 if keys else 1]
        return new, self._similarity(new.flatten(1).float(), cache[slots].flatten(1).float())

    def _linear(
        self,
        x: Tensor,
        w: LayerWeights,
        field: str,
        adapters: AdapterRows,
        part: slice = slice(None),
        bias: Tensor | None = None,
    ) -> Tensor:
        """`x` [N, K] times `part` of the rows of the matrix `field` of `w`, with what `adapters` add to it."""
        matrix: Tensor = getattr(w, field)
        out = self.arithmetic.linear(x, matrix if part == slice(None) else matrix[part], bias)
        changes = w.low_rank.get(field)
        return out if changes is None else adapters.add(out, x, changes, self.arithmetic, part)

    def _project(self, x: Tensor, layer: int, heads: range, turns: Pair, adapters: AdapterRows = NO_ADAPTERS) -> Pair:
        """Heads of normed rows `x` [N, D] in `layer`: Q and K after norm and RoPE, and V, [N, any, Dh] each.

        `heads` counts Q's first, then K's, then V's, in the order of the fused projection.
        """
        w, c = self.weights.layers[layer], self.parts[self.slides[layer]]
        first, stop, after = heads.start, heads.stop, c.heads + c.kv_heads
        tied = c.tied_values and stop > after
        if tied:  # of K's rows, which come last
            first, stop = min(first, c.heads), after
        part = slice(first * c.head_dim, stop * c.head_dim)
        bias = None if w.qkv_bias is None else w.qkv_bias[part]
        out = self._linear(x, w, "qkv", adapters, part, bias).view(len(x), stop - first, c.head_dim)
        keys, values = max(0, c.heads - first), max(0, after - first)
        v = out[:, keys:].clone() if tied else out[:, values:]
        for some, weight in ((out[:, :keys], w.q_norm), (out[:, keys:values], w.k_norm)):
            if weight is not None and some.shape[1]:
                self._norm_heads(some, weight)
        if c.value_norm:
            v = F.rms_norm(v, (c.head_dim,), None, c.norm_eps)
        return rotate(out[:, heads.start - first : values], *turns), v

    def _feed(self, h: Tensor, x: Tensor, w: LayerWeights, adapters: AdapterRows) -> Tensor:
        """FFN output of rows `h`, which are normed as `x`: of a dense MLP, or of a mixture's experts."""
        mixture, config = w.mixture, self.config.mixture
        if mixture is None or config is None:
            return self.ranks.sum(self._mlp(x, w, adapters))
        rest = mixture, self.arithmetic, self.ranks.shard.experts(config), self.activation
        if not config.normed:
            routed = feed(x, self.route(x, mixture), *rest)
            return self.ranks.sum(routed if len(w.gate_up) == 0 else routed.add_(self._mlp(x, w, adapters)))
        routed = feed(self.norm(h, mixture.expert_norm), self.route(self.norm(h, mixture.router_norm), mixture), *rest)
        routed = self.norm(self.ranks.sum(routed), mixture.expert_post)
        return routed + self.norm(self.ranks.sum(self._mlp(x, w, adapters)), mixture.shared_post)

    def _mlp(self, x: Tensor, w: LayerWeights, adapters: AdapterRows) -> Tensor:
        """Output of the dense MLP, or of the shared expert, of normed rows `x`."""
        inner = self._linear(x, w, "gate_up", adapters, bias=w.up_bias)
        if self.config.mlp == "relu2":
            inner = inner.relu_().square_()
        elif self.kernels is not None and self.activation != "gelu_tanh":
            inner = self.kernels.gate(inner, gelu=self.activation == "gelu")
        else:
            gate, up = inner.chunk(2, dim=-1)
            inner = self.arithmetic.activate_(gate, self.activation).mul_(up)
        return self._linear(inner, w, "down", adapters, bias=w.down_bias)

    def _norm_heads(self, heads: Tensor, weight: Tensor) -> None:
        """RMS norm of `heads` [N, heads, Dh] in place: of each head, or of all ranks' heads together."""
        x = heads.flatten(1) if self.config.qk_norm == "whole" else heads
        if x is heads or not self.ranks.several:
            heads.copy_(F.rms_norm(x, weight.shape, weight, self.config.norm_eps).view_as(heads))
            return
        # Where ranks share heads of K, each counts as often as every other one.
        numbers = x.shape[1] * self.ranks.shard.size
        mean = self.ranks.sum(x.float().square().sum(dim=1, keepdim=True)) / numbers
        normed = x.float() * (mean + self.config.norm_eps).rsqrt() * weight.float()
        heads.copy_(normed.view_as(heads))

    def _similarity(self, new: Tensor, old: Tensor) -> Tensor:
        """Cosine similarity of the rows of `new` and `old`, float32 [N, any], over the heads of all ranks: [N]."""
        if not self.ranks.several:
            return F.cosine_similarity(new, old, dim=1)
        products = torch.stack([torch.linalg.vecdot(x, y) for x, y in ((new, old), (new, new), (old, old))])
        dot, *squares = self.ranks.sum(products)
        left, right = (square.sqrt().clamp_min(COSINE_EPS) for square in squares)
        similarity: Tensor = dot / (left * right)
        return similarity


def _enter(stage: Stage, h: Tensor) -> Tensor:
    """The stage's rows, carried from the stage before or restored. States that the stage saves are copied."""
    if stage.carry is not None:
        source, target = stage.carry
        carried = h.index_select(0, source)
        if target is None:
            h = carried
        else:
            h = h.new_empty((len(stage.positions), h.shape[1]))
            h[target] = carried
    for restore in stage.restore:
        h[restore.rows] = restore.states[restore.positions]
    for save in stage.save:
        save.states[save.positions] = h[save.rows]
    return h


def _least(values: Tensor, pick: Pick) -> Tensor:
    """The rows of `pick` with the least `values` [A] of each canvas, int64 [S]; the earlier one where two are equal."""
    # First by value, then stably by canvas, so that two sorts serve canvases of different sizes.
    by_value = values.argsort(stable=True)
    order = by_value[pick.owner[by_value].argsort(stable=True)]
    chosen = pick.rows[order[pick.order]]
    pick.chosen.append(chosen)
    return chosen


def _outputs(cache: Tensor, new: Tensor, rows: Tensor, slots: Tensor, written: Tensor | None) -> Tensor:
    """The outputs of all rows of a stage, [N, D]: `new` for the computed `rows`, the cached ones for the others.

    `new` is cached too, except for rows that `written` leaves out: canvases that lease one prefix share its slots.
    """
    if written is None:
        cache.index_copy_(0, slots[rows], new)
        return cache[slots]
    cache.index_copy_(0, slots[rows[written]], new[written])
    return cache[slots].index_copy_(0, rows, new)
