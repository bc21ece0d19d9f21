"""The transformer. It executes any step batch, and knows no cache policy and no model by name."""

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Self, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from remask.model.arithmetic import Arithmetic, query_scales, rope, rotate
from remask.model.attention import Attention, Sink, SizedAttention, attend_sliding
from remask.model.attention_torch import TorchAttention
from remask.model.config import ModelConfig
from remask.model.graphs import Graphs
from remask.model.mixture import Routes, mixture_output, route
from remask.model.pool import Pool, cpu_kv_dtype
from remask.model.quantized import QuantizedMatrix, UnroundedArithmetic
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
        rank_config: the shape that this rank computes with, in layers with full attention.
        rank_configs: `rank_config`, and the shape of sliding layers if there are any.
        rope_tables: cos and sin for each of `rank_configs`, [max_length, 1, R / 2].
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
        self.config = config
        self.weights = weights
        self.arithmetic = arithmetic or Arithmetic()
        self.ranks = ranks or Ranks()
        self.attention = attention or TorchAttention(config.score_cap)
        self.kernels = kernels
        self.rank_config = self.ranks.shard.part(config)
        self.rank_configs = tuple(map(self.ranks.shard.part, config.shapes))
        self.rope_tables = tuple(rope(shape, weights.embed.dtype, weights.embed.device) for shape in config.shapes)
        self.is_sliding = tuple(map(config.is_sliding, range(config.layers)))
        self.query_scales = query_scales(config, weights.embed.dtype, weights.embed.device)
        zeros = weights.embed.new_zeros(self.rank_config.kv_heads, self.rank_config.head_dim)
        self._zero_sink: Sink | None = (zeros, zeros) if config.sink == "zero" else None
        self.activation = config.activation
        scale = torch.tensor(1.0 if config.embed_scale is None else config.embed_scale)
        self.embed_scale = float(scale.to(weights.embed.dtype))  # rounded as the embedding is, as in transformers

    def with_attention(self, attention: Attention) -> Self:
        """A copy that shares the weights, attends by `attention`, and has no graphs."""
        model = copy(self)
        model.attention = attention
        model.graphs = None
        return model

    def with_graphs(self, graphs: Graphs) -> Self:
        """A copy that shares the weights, and whose layers `graphs` repeats."""
        model = copy(self)
        model.graphs = graphs
        return model

    def without_rounding(self) -> Self:
        """A copy that shares the weights, does not round the rows of its products, and has no graphs.

        Returns the model itself if its matrices are not quantized.
        """
        if not self.quantized:
            return self
        model = copy(self)
        model.arithmetic = UnroundedArithmetic()
        model.graphs = None
        return model

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
        """The dtype of K/V: the model's, but at most bfloat16 beside quantized weights on a CPU."""
        if self.device.type != "cpu" or isinstance(self.attention, SizedAttention):
            return self.dtype
        return cpu_kv_dtype(self.dtype, self.quantized)

    @property
    def quantized(self) -> bool:
        """Whether the matrices are quantized."""
        return any(isinstance(layer.qkv, QuantizedMatrix) for layer in self.weights.layers)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, pool: Pool) -> Tensor:
        """Run all stages, and return the input of the output matrix at the predicted rows, [M, D].

        Writes K/V to `pool`, and hidden states to the tensors of each `Stage.save`. The host does not wait for the
        device.
        """
        h = self.embed(batch.tokens)
        if batch.signals is not None:
            h = self.self_condition(h, batch.signals, pool)
        for stage in batch.stages:
            h = self.run(stage, h, pool)
        return self.head_input(h.index_select(0, batch.predict))

    def embed(self, tokens: Tensor) -> Tensor:
        """The embedding of `tokens` [N], scaled and normed if the model does so, [N, D]."""
        h = F.embedding(tokens, self.weights.embed)
        if self.embed_scale != 1:
            h = h * self.embed_scale
        return h if self.weights.embed_norm is None else self.norm(h, self.weights.embed_norm)

    @torch.inference_mode()
    def expected_embedding(self, probabilities: Tensor) -> Tensor:
        """The expected embedding [M, D] under the `probabilities` [M, V] of this rank's tokens, summed over ranks."""
        tokens = self.ranks.shard.share(self.config.vocab)
        embed = self.weights.embed[tokens.start : tokens.stop]
        return self.ranks.sum(self.arithmetic.linear(probabilities.to(embed.dtype), embed.T)) * self.embed_scale

    @torch.inference_mode()
    def self_condition(self, h: Tensor, signals: Signals, pool: Pool) -> Tensor:
        """Return the embedded rows `h` [N, D], with the last pass' predictions added to the rows in `signals`.

        The expected embeddings in `pool.signals` pass through an MLP, and the sum is normed (DiffusionGemma's
        self-conditioning). `h` is unchanged.
        """
        w = self.weights.signal
        assert w is not None
        assert pool.signals is not None
        expected = self.norm(pool.signals[signals.slots], w.norm)
        gate, up = self.arithmetic.linear(expected, w.gate_up).chunk(2, dim=-1)
        inner = self.arithmetic.activate_(gate, self.activation).mul_(up)
        total = h[signals.rows] + self.ranks.sum(self.arithmetic.linear(inner, w.down))
        normed = F.rms_norm(total, (self.config.hidden,), None, self.config.norm_eps)
        return h.index_copy(0, signals.rows, normed)

    def run(self, stage: Stage, h: Tensor, pool: Pool) -> Tensor:
        """Run `stage` on the output `h` of the stage before, which may be overwritten. Returns its output [N, D].

        Writes K/V to `pool`, and with `Stage.outputs` outputs, and hidden states to the tensors of `Stage.save`.
        """
        if stage.outputs or stage.partial is not None:
            pool.allocate_outputs()
        h = _stage_input(stage, h)
        if self.graphs is not None and self.graphs.can_repeat(stage, pool):
            return self.graphs.run(self, stage, h)
        partial, positions, slots = stage.partial, stage.positions, stage.slots
        if self.kernels is not None and partial is None:
            slots = self._kernel_slots(slots, stage, len(h))
        # On a CPU `index_select` takes a third of the time of an index in brackets.
        query_scale = None if self.query_scales is None else self.query_scales.index_select(0, positions)
        full_and_sliding = [
            Rows(
                cos=cos.index_select(0, positions),
                sin=sin.index_select(0, positions),
                slots=slots,
                written_rows=stage.written_rows,
                outputs=stage.outputs,
                adapters=stage.adapters,
                query_scale=query_scale,
                roles=stage.roles,
            )
            for cos, sin in self.rope_tables
        ]
        for layer in stage.layers:
            rows = full_and_sliding[self.is_sliding[layer]]
            work = stage.sliding_work if self.is_sliding[layer] else stage.work
            if partial is not None:
                h = self._run_partial_layer(h, layer, stage, pool, (rows.cos, rows.sin))
                continue
            assert work is not None
            attended = self.attend(self.project(h, layer, rows, pool), layer, work, pool)
            h = self.finish_layer(h, attended, layer, rows, pool)
        return h

    def project(self, h: Tensor, layer: int, rows: Rows, pool: Pool) -> Tensor:
        """Return the queries of `rows` in a layer with the input `h` [N, D], after norm and RoPE: [N, heads, Dh].

        Writes K/V of the rows in `rows.written_rows` to their slots of `pool`.
        """
        w = self.weights.layers[layer]
        c = self.rank_configs[self.is_sliding[layer]]
        x = self.norm(h, w.attn_norm)
        cos_sin = rows.cos, rows.sin
        heads = c.heads + 2 * c.kv_heads
        if self.kernels is not None:
            qkv = self._linear(x, w, "qkv", rows.adapters, bias=w.qkv_bias)
            q = self.kernels.place_heads(qkv, w, rows.cos, rows.sin, pool.k[layer], pool.v[layer], rows.slots)
            return q if rows.query_scale is None else q.mul_(rows.query_scale)
        if rows.written_rows is None and not self.arithmetic.invariant:
            qk, v = self._project(x, layer, range(heads), cos_sin, rows.adapters)
            q, k = qk[:, : c.heads], qk[:, c.heads :]
        else:
            # Two products where one would do, if bits must not depend on what other canvases leave out.
            q, _ = self._project(x, layer, range(c.heads), cos_sin, rows.adapters)
            adapters = rows.adapters
            if rows.written_rows is not None:
                x = x[rows.written_rows]
                cos_sin = rows.cos[rows.written_rows], rows.sin[rows.written_rows]
                adapters = adapters.subset(rows.written_rows)
            k, v = self._project(x, layer, range(c.heads, heads), cos_sin, adapters)
        pool.k[layer].index_copy_(0, rows.slots, k.to(pool.k[layer].dtype))
        pool.v[layer].index_copy_(0, rows.slots, v.to(pool.v[layer].dtype))
        return q if rows.query_scale is None else q.mul_(rows.query_scale)

    def attend(self, q: Tensor, layer: int, work: WorkList, pool: Pool) -> Tensor:
        """Attention of the queries `q` [N, heads, Dh] to K/V of `layer` in `pool`, [N, heads * Dh]."""
        return self.attention(q, pool.k[layer], pool.v[layer], work, self.sink(layer))

    def finish_layer(self, h: Tensor, attended: Tensor, layer: int, rows: Rows, pool: Pool) -> Tensor:
        """Add the outputs of attention and FFN to `h` [N, D], and return it. With `rows.outputs`, `pool` gets them too.

        `attended` [N, heads * Dh] are the results of `attend`, before the output projection.
        """
        w = self.weights.layers[layer]
        attention_outputs, ffn_outputs = pool.outputs[layer] if rows.outputs else (None, None)
        attention_out = self.ranks.sum(self._linear(attended, w, "out", rows.adapters))
        x = self._add_and_norm(h, self.norm(attention_out, w.attn_post), w.ffn_norm, attention_outputs, rows)
        ffn_out = self._feed_forward(h, x, w, rows.adapters)
        h = self._add_and_norm(h, self.norm(ffn_out, w.ffn_post), None, ffn_outputs, rows)
        if w.scale is not None:
            h *= w.scale[0] if rows.roles is None else w.scale.index_select(0, rows.roles)[:, None]
        return h

    def sink(self, layer: int) -> Sink | None:
        """The key and value [kv_heads, Dh] that every row attends to in `layer`; None: the model has no sink."""
        w = self.weights.layers[layer]
        return self._zero_sink if w.sink_k is None or w.sink_v is None else (w.sink_k, w.sink_v)

    def value_similarity(self, stage: Stage, h: Tensor, pool: Pool, rows: Tensor, slots: Tensor) -> Tensor:
        """Cosine similarity of new V in the first layer of `stage` to V in `pool`, float32 [n]. Writes no V.

        `h` is the output of the stage before. `rows`, int64 [n], are the compared rows of `stage`, and `slots` theirs.
        """
        layer = stage.layers.start
        x = _stage_input(stage, h)[rows]
        cos_sin = self.cos_sin(layer, stage.positions[rows])
        adapters = stage.adapters.subset(rows)
        return self._project_and_compare(x, layer, pool.v[layer], slots, cos_sin, adapters, keys=False)[1]

    def head_input(self, h: Tensor) -> Tensor:
        """The input of the output matrix, [N, D], from the last layer's output `h` [N, D].

        This is the final norm; with `ModelConfig.head_dense` a square matrix, GELU and another norm follow.
        """
        w = self.weights
        x = self.norm(h, w.norm)
        if w.head_dense is None:
            return x
        return self.norm(self.arithmetic.activate_(self.arithmetic.linear(x, w.head_dense), "gelu"), w.head_norm)

    def norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """The norm of the rows of `x` [N, D]; `x` itself if `weight` is None."""
        if weight is None:
            return x
        if self.kernels is not None:
            return self.kernels.norm(x, weight)
        norm = F.layer_norm if self.config.norm == "layer" else F.rms_norm
        return norm(x, weight.shape, weight, eps=self.config.norm_eps)

    def cos_sin(self, layer: int, positions: Tensor) -> Pair:
        """cos and sin of RoPE in `layer` at `positions` [N], [N, 1, R / 2] each."""
        cos, sin = self.rope_tables[self.is_sliding[layer]]
        return cos[positions], sin[positions]

    def queries(self, h: Tensor, layer: int, positions: Tensor, adapters: AdapterRows = NO_ADAPTERS) -> Tensor:
        """This rank's queries after RoPE, [N, heads, Dh], of rows at `positions` with the layer's input `h` [N, D]."""
        x = self.norm(h, self.weights.layers[layer].attn_norm)
        q, _ = self._project(x, layer, range(self.rank_config.heads), self.cos_sin(layer, positions), adapters)
        return q if self.query_scales is None else q * self.query_scales[positions]

    def route(self, x: Tensor, w: MixtureWeights) -> Routes:
        """The experts chosen for the normed rows `x` [N, D] in a layer with the mixture `w`, and their weights."""
        assert self.config.mixture is not None
        return route(x, self.config.mixture.router, self.config.mixture.active, w, self.arithmetic)

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Logits [M, V] of this rank's tokens, from the outputs `hidden` [M, D] of `head_input`.

        They have the dtype of `hidden`; with a cap on logits, float32 at least.
        """
        logits = self.arithmetic.linear(hidden, self.weights.head, self.weights.head_bias)
        cap = self.config.logit_cap
        if cap is None:
            return logits
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(cap).tanh_().mul_(cap)

    def _add_and_norm(self, h: Tensor, x: Tensor, weight: Tensor | None, outputs: Tensor | None, rows: Rows) -> Tensor:
        """Add `x` to `h` in place. Returns the norm of the sum with `weight`, or `h` if there is none.

        With `outputs`, a tensor of `Pool.outputs`, `x` of the rows that are written is stored in their slots of it.
        """
        if self.kernels is not None:
            return self.kernels.add(h, x, weight, outputs, rows.slots)
        if outputs is not None:
            outputs.index_copy_(0, rows.slots, x if rows.written_rows is None else x[rows.written_rows])
        h += x
        return h if weight is None else self.norm(h, weight)

    def _kernel_slots(self, slots: Tensor, stage: Stage, rows: int) -> Tensor:
        """The `slots` [W] of written rows as kernels take them, int64 [rows]: rows that are not written have -1."""
        if stage.written_rows is None:
            return slots
        return slots.new_full((rows,), -1).index_copy_(0, stage.written_rows, slots)

    def _run_partial_layer(self, h: Tensor, layer: int, stage: Stage, pool: Pool, cos_sin: Pair) -> Tensor:
        """Compute the rows of `stage.partial` in `layer`, add the outputs of all rows to `h` [N, D], and return it.

        Rows that are not computed have the outputs in `pool`. Writes K/V and outputs of computed rows to `pool`.
        """
        assert stage.partial is not None
        w = self.weights.layers[layer]
        partial = stage.partial
        computed = partial.computed
        for pick in partial.picks:
            if (pick.phase + layer - stage.layers.start) % pick.every:  # the rows of the last layer that picked
                picked_rows = _lowest_rows(~pool.picked[partial.slots[pick.rows]], pick)
            else:
                picked_rows = self._pick_rows(h, layer, stage, pick, pool, cos_sin)
            computed = computed.index_copy(0, pick.target, picked_rows)
        slots = partial.slots[computed]
        row_slots = slots if stage.written_rows is None else slots[stage.written_rows]
        row_slots = row_slots if self.kernels is None else self._kernel_slots(row_slots, stage, len(computed))
        adapters = stage.adapters.subset(computed)
        query_scale = None if self.query_scales is None else self.query_scales[stage.positions[computed]]
        cos, sin = cos_sin
        rows = Rows(
            cos=cos[computed],
            sin=sin[computed],
            slots=row_slots,
            written_rows=stage.written_rows,
            outputs=True,
            adapters=adapters,
            query_scale=query_scale,
        )
        q = self.project(h[computed], layer, rows, pool)
        work = stage.sliding_work if self.is_sliding[layer] else stage.work
        if work is None:  # rows were picked on the device, and the host does not know which
            attended = self._attend_sliding(q, layer, partial, computed, pool)
        else:
            attended = self.attend(q, layer, work, pool)
        attention_outputs, ffn_outputs = pool.outputs[layer]
        attention_out = self.norm(self.ranks.sum(self._linear(attended, w, "out", adapters)), w.attn_post)
        h += _update_outputs(attention_outputs, attention_out, computed, partial.slots, stage.written_rows)
        x = h[computed]
        ffn_out = self.norm(self._feed_forward(x, self.norm(x, w.ffn_norm), w, adapters), w.ffn_post)
        h += _update_outputs(ffn_outputs, ffn_out, computed, partial.slots, stage.written_rows)
        return h

    def _attend_sliding(self, q: Tensor, layer: int, partial: Partial, computed: Tensor, pool: Pool) -> Tensor:
        """Attention of the queries `q` of the `computed` rows of a stage in a sliding layer, [C, heads * Dh]."""
        reach = self.config.reach(layer)
        assert partial.neighbours is not None
        assert reach is not None
        neighbours = replace(partial.neighbours, places=partial.neighbours.places.index_select(1, computed))
        k, v = pool.k[layer], pool.v[layer]
        return attend_sliding(q, k, v, neighbours, reach, self.sink(layer), self.config.score_cap)

    def _pick_rows(self, h: Tensor, layer: int, stage: Stage, pick: Pick, pool: Pool, cos_sin: Pair) -> Tensor:
        """Write V (or K) of all rows of `pick`, and return those whose V (or K) changed most, int64 [S].

        `h` [N, D] are the inputs of the rows of `stage`, and `cos_sin` their RoPE. The host does not wait: how many
        rows are picked of each canvas is known before.
        """
        assert stage.partial is not None
        slots = stage.partial.slots[pick.rows]
        adapters = stage.adapters.subset(pick.rows)
        kv = pool.k[layer] if pick.keys else pool.v[layer]
        cos, sin = cos_sin
        rotation = cos[pick.rows], sin[pick.rows]
        values, similarity = self._project_and_compare(
            h[pick.rows], layer, kv, slots, rotation, adapters, keys=pick.keys
        )
        picked = _lowest_rows(similarity, pick)
        kv.index_copy_(0, slots, values.to(kv.dtype))
        if pick.every > 1:
            pool.picked.index_fill_(0, slots, False).index_fill_(0, stage.partial.slots[picked], True)
        return picked

    def _project_and_compare(
        self, h: Tensor, layer: int, kv: Tensor, slots: Tensor, cos_sin: Pair, adapters: AdapterRows, *, keys: bool
    ) -> Pair:
        """New V (or with `keys` K) of rows with the input `h` [N, D], and its similarity [N] to `kv` in `slots` [N]."""
        c = self.rank_configs[self.is_sliding[layer]]
        first_head = c.heads if keys else c.heads + c.kv_heads
        x = self.norm(h, self.weights.layers[layer].attn_norm)
        k, v = self._project(x, layer, range(first_head, first_head + c.kv_heads), cos_sin, adapters)
        values = k if keys else v
        return values, self._similarity(values.flatten(1).float(), kv[slots].flatten(1).float())

    def _linear(
        self,
        x: Tensor,
        w: LayerWeights,
        field: str,
        adapters: AdapterRows,
        part: slice = slice(None),
        bias: Tensor | None = None,
    ) -> Tensor:
        """`x` [N, K] times `part` of the rows of the matrix `field` of `w`, plus `bias` and products of `adapters`."""
        matrix: Tensor = getattr(w, field)
        out = self.arithmetic.linear(x, matrix if part == slice(None) else matrix[part], bias)
        changes = w.low_rank.get(field)
        return out if changes is None else adapters.add(out, x, changes, self.arithmetic, part)

    def _project(self, x: Tensor, layer: int, heads: range, cos_sin: Pair, adapters: AdapterRows = NO_ADAPTERS) -> Pair:
        """Q and K heads after norm and RoPE, and V heads, of normed rows `x` [N, D]: [N, any, Dh] each.

        `heads` counts heads in the order of the fused projection: Q, K, V. Only the heads in this range are computed.
        """
        w = self.weights.layers[layer]
        c = self.rank_configs[self.is_sliding[layer]]
        first, stop = heads.start, heads.stop
        first_value = c.heads + c.kv_heads
        tied = c.tied_values and stop > first_value
        if tied:  # V is made of K's rows, which are the last ones then
            first, stop = min(first, c.heads), first_value
        part = slice(first * c.head_dim, stop * c.head_dim)
        bias = None if w.qkv_bias is None else w.qkv_bias[part]
        out = self._linear(x, w, "qkv", adapters, part, bias).view(len(x), stop - first, c.head_dim)
        k_start, v_start = max(0, c.heads - first), max(0, first_value - first)  # where K and V begin in `out`
        v = out[:, k_start:].clone() if tied else out[:, v_start:]
        for q_or_k, weight in ((out[:, :k_start], w.q_norm), (out[:, k_start:v_start], w.k_norm)):
            if weight is not None and q_or_k.shape[1]:
                self._norm_heads(q_or_k, weight)
        if c.value_norm:
            v = F.rms_norm(v, (c.head_dim,), None, c.norm_eps)
        return rotate(out[:, heads.start - first : v_start], *cos_sin), v

    def _feed_forward(self, h: Tensor, x: Tensor, w: LayerWeights, adapters: AdapterRows) -> Tensor:
        """The output [N, D] of a dense MLP or a mixture of experts, from rows `h` and their norm `x`, [N, D] each."""
        mixture, config = w.mixture, self.config.mixture
        if mixture is None or config is None:
            return self.ranks.sum(self._mlp(x, w, adapters))
        experts = mixture, self.arithmetic, self.ranks.shard.experts(config), self.activation
        if not config.normed:
            routed = mixture_output(x, self.route(x, mixture), *experts)
            return self.ranks.sum(routed if len(w.gate_up) == 0 else routed.add_(self._mlp(x, w, adapters)))
        routes = self.route(self.norm(h, mixture.router_norm), mixture)
        routed = mixture_output(self.norm(h, mixture.expert_norm), routes, *experts)
        routed = self.norm(self.ranks.sum(routed), mixture.expert_post)
        return routed + self.norm(self.ranks.sum(self._mlp(x, w, adapters)), mixture.shared_post)

    def _mlp(self, x: Tensor, w: LayerWeights, adapters: AdapterRows) -> Tensor:
        """The output [N, D] of the dense MLP, or of the shared expert, from normed rows `x` [N, D]."""
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
        """RMS norm of `heads` [N, heads, Dh], in place: of each head, or of all ranks' heads together."""
        x = heads.flatten(1) if self.config.qk_norm == "whole" else heads
        if x is heads or not self.ranks.several:
            heads.copy_(F.rms_norm(x, weight.shape, weight, self.config.norm_eps).view_as(heads))
            return
        # If ranks share heads of K, every head is counted equally often, so the mean is right.
        width = x.shape[1] * self.ranks.shard.size
        mean = self.ranks.sum(x.float().square().sum(dim=1, keepdim=True)) / width
        normed = x.float() * (mean + self.config.norm_eps).rsqrt() * weight.float()
        heads.copy_(normed.view_as(heads))

    def _similarity(self, new: Tensor, old: Tensor) -> Tensor:
        """Cosine similarity [N] of the rows of `new` and `old`, float32 [N, any] each, over the heads of all ranks."""
        if not self.ranks.several:
            return F.cosine_similarity(new, old, dim=1)
        products = torch.stack([torch.linalg.vecdot(x, y) for x, y in ((new, old), (new, new), (old, old))])
        dot, *squares = self.ranks.sum(products)
        new_norm, old_norm = (square.sqrt().clamp_min(COSINE_EPS) for square in squares)
        similarity: Tensor = dot / (new_norm * old_norm)
        return similarity


def _stage_input(stage: Stage, h: Tensor) -> Tensor:
    """Return the input [N, D] of the rows of `stage`: rows of the output `h` of the stage before, or stored states.

    Copies the rows of `stage.save` to their states. May overwrite `h`.
    """
    if stage.carry is not None:
        source, target = stage.carry
        rows = h.index_select(0, source)
        if target is None:
            h = rows
        else:
            h = h.new_empty((len(stage.positions), h.shape[1]))
            h[target] = rows
    for restore in stage.restore:
        h[restore.rows] = restore.states[restore.positions]
    for save in stage.save:
        save.states[save.positions] = h[save.rows]
    return h


def _lowest_rows(values: Tensor, pick: Pick) -> Tensor:
    """Return the rows of each canvas with the lowest `values` [A], int64 [S]; of equal ones the first.

    Appends them to `pick.picked_rows`.
    """
    # First by value, then stably by canvas, so that two sorts serve canvases of different sizes.
    by_value = values.argsort(stable=True)
    order = by_value[pick.owner[by_value].argsort(stable=True)]
    lowest = pick.rows[order[pick.order]]
    pick.picked_rows.append(lowest)
    return lowest


def _update_outputs(outputs: Tensor, x: Tensor, computed: Tensor, slots: Tensor, written: Tensor | None) -> Tensor:
    """Store `x` [C, D], the outputs of `computed` rows, in `outputs`, and return those of all rows of a stage, [N, D].

    `slots` [N] are those of all rows. Only the outputs at `written`, indices into `computed`, are stored; None: all.
    Canvases that lease one prefix share its slots.
    """
    if written is None:
        outputs.index_copy_(0, slots[computed], x)
        return outputs[slots]
    outputs.index_copy_(0, slots[computed[written]], x[written])
    return outputs[slots].index_copy_(0, computed, x)
