"""What FSDP2 training costs in communication, computed: bytes a step, and the time of a step on published links.

    python -m benchmarks.scaling_cost                 the tables
    python -m benchmarks.scaling_cost --write-docs    into docs/guides/scaling.md

Nothing is measured here. A step of a model of L layers gathers each weight for the forward and again for the backward,
and sends each gradient once; what stands outside of the layers is gathered once:

    bytes a rank sends = (R - 1) / R * (2 G_layers + G_rest + D)      G gathered weights, D gradients, R ranks

Time of an all-gather, or a reduce-scatter, of S bytes over nodes of r ranks (`Cluster`), n = R / r nodes:

    ring   ((R - 1) - (n - 1)) a_in + (n - 1) a_net + (R - 1) / R * S / min(b_in, r b_net)
    tree   log2(r) a_in + log2(n) a_net + (r - 1) / r * S / b_in + (n - 1) / n * S / r / b_net

The ring, which passes through each node once for every network card, is the model that NCCL chooses algorithms by
(NVIDIA/nccl, src/graph/tuning.cc: steps and latencies). The tree is recursive doubling (Thakur, Rabenseifner and Gropp,
Optimization of Collective Communication Operations in MPICH, IJHPCA 19(1), 2005, section 4), over the network first,
where each rank has 1 / R of the data, and then in the node.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import common

DOCS = Path(__file__).parent.parent / "docs" / "guides" / "scaling.md"

RANKS = (8, 64, 512, 4096)


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs.

    Args:
        name: of the network.
        network: bytes a second, in each direction, from a rank to other nodes.
        inside: the same, to ranks of its node.
        latency_network, latency_inside: seconds of a step of an algorithm.
        ranks: of a node.
    """

    name: str
    network: float
    inside: float = 450e9
    latency_network: float = 14.0e-6
    latency_inside: float = 3.4e-6
    ranks: int = 8


CLUSTERS = (
    Cluster("InfiniBand NDR, 400 Gb/s a GPU", 400e9 / 8),
    Cluster("Ethernet, 100 Gb/s a node", 100e9 / 8 / 8),
)


@dataclass(frozen=True)
class Model:
    """A Llama.

    Args:
        keys: heads of keys and values times their size.
        vocabulary: of the embedding and the head, which are not tied.
    """

    name: str
    hidden: int
    intermediate: int
    layers: int
    keys: int
    vocabulary: int

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """(rows, columns) of the weights of a layer."""
        h, i = self.hidden, self.intermediate
        return [(h, h), (self.keys, h), (self.keys, h), (h, h), (i, h), (i, h), (h, i)]

    @property
    def in_layer(self) -> int:
        """Elements of the matrices of a layer."""
        return sum(rows * columns for rows, columns in self.matrices)

    @property
    def norms(self) -> int:
        """Elements of the norms of a layer."""
        return 2 * self.hidden

    @property
    def rest(self) -> int:
        """Elements outside of the layers."""
        return 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * (self.in_layer + self.norms) + self.rest


MODELS = (
    Model("1B of the benchmark", 2048, 5632, 20, 2048, 256),
    Model("Llama 3 8B", 4096, 14336, 32, 1024, 128256),
)


@dataclass(frozen=True)
class Width:
    """What a recipe sends.

    Args:
        name: of the row.
        bits: of an element of a matrix in a layer.
        row_bits: of what each row of such a matrix has besides.
        floats: bytes of an element that is not in a matrix of a layer, and of a gradient.
    """

    name: str
    bits: float
    row_bits: float
    floats: int

    def matrix(self, rows: int, columns: int) -> float:
        """Bytes of a matrix."""
        return rows * (columns * self.bits + self.row_bits) / 8

    def layer(self, model: Model) -> float:
        """Bytes of a layer."""
        return sum(self.matrix(*shape) for shape in model.matrices) + self.floats * model.norms


WIDTHS = (
    Width("float32", 32, 0, 4),
    Width("bfloat16", 16, 0, 2),
    Width("INT8 weights", 8, 32, 2),
    Width("BitNet, 2 bits", 2, 0, 2),
)

TOKENS = 8192
"""Of a rank in a step."""

FLOPS = 0.4 * 989.4e12
"""Of a rank, a second: 40% of what an H100 SXM has in bf16 without sparsity."""


def ring(size: float, ranks: int, cluster: Cluster) -> float:
    """Seconds of an all-gather, or a reduce-scatter, of `size` bytes; see the top of the file."""
    nodes = math.ceil(ranks / cluster.ranks)
    bandwidth = cluster.inside if nodes == 1 else min(cluster.inside, cluster.ranks * cluster.network)
    latency = (ranks - nodes) * cluster.latency_inside + (nodes - 1) * cluster.latency_network
    return latency + (ranks - 1) / ranks * size / bandwidth


def tree(size: float, ranks: int, cluster: Cluster) -> float:
    """Seconds of an all-gather, or a reduce-scatter, of `size` bytes by recursive doubling; see the top of the file."""
    inside = min(ranks, cluster.ranks)
    nodes = ranks // inside
    latency = math.log2(inside) * cluster.latency_inside + math.log2(nodes) * cluster.latency_network
    through_network = (nodes - 1) / nodes * size / inside / cluster.network
    return latency + through_network + (inside - 1) / inside * size / cluster.inside


Collective = Callable[[float, int, Cluster], float]


def sent(model: Model, width: Width, ranks: int) -> float:
    """Bytes that a rank sends in a step."""
    gathered = 2 * model.layers * width.layer(model) + width.floats * model.rest
    return (ranks - 1) / ranks * (gathered + width.floats * model.parameters)


def communication(model: Model, width: Width, ranks: int, cluster: Cluster, collective: Collective) -> float:
    """Seconds of all collectives of a step, one after the other."""
    gradients = width.floats * (model.in_layer + model.norms)
    of_layer = 2 * collective(width.layer(model), ranks, cluster) + collective(gradients, ranks, cluster)
    return model.layers * of_layer + 2 * collective(width.floats * model.rest, ranks, cluster)


def computation(model: Model) -> float:
    """Seconds of the products of a step: six operations for each parameter and token, without attention."""
    return 6 * model.parameters * TOKENS / FLOPS


def tensor_parallel_bytes(hidden: int, ranks: int, sums: int, scales: int) -> float:
    """Bytes that a rank sends for a token, in the forward and the backward of a pair of layers, one cut by columns and
    one by rows, by rings.

    Args:
        hidden: features that the pair reads and writes.
        sums: bytes of an element of a sum over ranks; there are two of `hidden` elements, y and dx.
        scales: numbers of 4 bytes for which a maximum is found: two a row of x of the row-wise layer, and of the
            gradient of the column-wise one.
    """
    return 2 * (ranks - 1) / ranks * (2 * hidden * sums + 4 * scales)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def bytes_table(model: Model) -> str:
    head = ["GB that a rank sends in a step", *(f"{ranks:,} ranks" for ranks in RANKS)]
    rows = [[width.name, *(f"{sent(model, width, ranks) / 1e9:.2f}" for ranks in RANKS)] for width in WIDTHS]
    return table(head, rows)


def time_table(model: Model, cluster: Cluster) -> str:
    """Communication by rings and trees; and the step, if the faster one is hidden behind the products."""
    head = [f"ms, {cluster.name}", *(f"{ranks:,} ranks" for ranks in RANKS)]
    rows = []
    for width in WIDTHS:
        cells = [width.name]
        for ranks in RANKS:
            times = [communication(model, width, ranks, cluster, how) for how in (ring, tree)]
            step = max(computation(model), min(times))
            cells.append(f"{times[0] * 1e3:,.0f} / {times[1] * 1e3:,.0f} / **{step * 1e3:,.0f}**")
        rows.append(cells)
    return table(head, rows)


def tensor_parallel_table() -> str:
    head = ["KB that a rank sends for a token", "2 ranks", "4 ranks", "8 ranks"]
    rows = []
    for name, sums, scales in (("bfloat16", 2, 0), ("float32", 4, 0), ("INT8, sums of integers", 4, 4)):
        cells = [f"{tensor_parallel_bytes(4096, ranks, sums, scales) / 1e3:.2f}" for ranks in (2, 4, 8)]
        rows.append([name, *cells])
    return table(head, rows)


def pages() -> dict[str, str]:
    """The tables of the page, by the names of their places."""
    made = {"scaling_tensor_parallel": tensor_parallel_table()}
    for name, model in zip(("1b", "8b"), MODELS, strict=True):
        size, products = f"{model.parameters / 1e9:.2f} billion parameters", f"{computation(model) * 1e3:,.0f} ms"
        parts = [f"**{model.name}**, {size}. The products of a step take {products}."]
        parts += [bytes_table(model), *(time_table(model, cluster) for cluster in CLUSTERS)]
        made[f"scaling_{name}"] = "\n\n".join(parts)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-docs", action="store_true", help="write the tables into docs/guides/scaling.md")
    options = parser.parse_args()
    for name, text in pages().items():
        if options.write_docs:
            common.write_docs(name, text, DOCS)
        else:
            print(f"{text}\n")


if __name__ == "__main__":
    main()
