"""Draws the pictures of the method: `python docs/pictures.py` writes nbs/images/{reconstruction,contrastive,refinement}.svg.

Plain SVG on a white panel, so that the pictures look the same on a light and on a dark page. The colours are those of the
plots (`figures.COLOURS`): blue for queries, green for documents, vermilion for vectors.
"""

from html import escape
from itertools import pairwise
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "nbs" / "images"
INK = "#1a1a1a"
GREY = "#6b6b6b"
QUERY = "#0072b2"
DOCUMENT = "#00785a"
VECTOR = "#d55e00"
OTHER = "#9a4f7f"
PALE = {QUERY: "#dcebf7", DOCUMENT: "#ddf1ea", VECTOR: "#d55e00", OTHER: "#f5e3ee", GREY: "#ededed"}
HEAD = "M0 0.8 L9 5 L0 9.2 z"


class Picture:
    """Shapes on a white panel; units are pixels at full size."""

    def __init__(self, width: int, height: int, title: str, description: str):
        self.size = (width, height)
        self.title = title
        self.description = description
        self.parts = []

    def text(
        self, x, y, words, size=14, colour=INK, anchor="start", weight="normal", style="normal"
    ):
        """A line of text; `a_b` is written with b as a subscript."""
        words, _, index = words.partition("_")
        below = (
            f'<tspan font-size="{size * 0.72:.0f}" dy="4">{escape(index)}</tspan>' if index else ""
        )
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}" '
            f'font-weight="{weight}" font-style="{style}">{escape(words)}{below}</text>'
        )

    def box(self, x, y, width, height, words="", colour=INK, fill="#ffffff", ink=INK, size=15):
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{fill}" '
            f'stroke="{colour}" stroke-width="1.6"/>'
        )
        if words:
            style = "italic" if "_" in words else "normal"
            self.text(
                x + width / 2, y + height / 2 + size * 0.34, words, size, ink, "middle", style=style
            )

    def token(self, x, y, words, colour, width=46):
        """One position of a sequence."""
        ink = "#ffffff" if colour == VECTOR else INK
        self.box(
            x, y, width, 30, words, colour, PALE[colour], ink, size=13 if words == "EOS" else 15
        )

    def row(self, x, y, words: str, colours, step=54):
        """Draws tokens side by side; returns the x of each."""
        for index, (word, colour) in enumerate(zip(words.split(), colours, strict=True)):
            self.token(x + step * index, y, word, colour)
        return [x + step * index + 23 for index in range(len(words.split()))]

    def arrow(self, *points, colour=GREY, width=1.6):
        """A line through (x, y) points with an arrowhead at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" '
            f'marker-end="url(#head{colour[1:]})"/>'
        )

    def svg(self) -> str:
        width, height = self.size
        heads = "".join(
            f'<marker id="head{colour[1:]}" viewBox="0 0 10 10" refX="8.5" refY="5" '
            'markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="{HEAD}" fill="{colour}"/></marker>'
            for colour in (GREY, VECTOR, QUERY, DOCUMENT, OTHER)
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                f'width="{width}" height="{height}" '
                'role="img" aria-labelledby="t d" font-family="Helvetica, Arial, \'DejaVu Sans\', '
                'sans-serif">',
                f'<title id="t">{escape(self.title)}</title>',
                f'<desc id="d">{escape(self.description)}</desc>',
                f"<defs>{heads}</defs>",
                f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="12" '
                'fill="#ffffff" stroke="#c8c8c8"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def reconstruction() -> Picture:
    """Both directions of Stage I for one pair, in two packed passes."""
    p = Picture(
        960,
        430,
        "Stage I in two packed passes",
        "One encode pass holds the query and the document, each ended by EOS. The states at EOS "
        "are the anchor vectors. One "
        "decode pass holds the query's anchor followed by the document's tokens, and the "
        "document's anchor followed by the "
        "query's; it predicts the document and the query.",
    )
    q = QUERY
    d = DOCUMENT
    e = VECTOR
    p.text(28, 40, "Encode", 18, weight="bold")
    p.text(112, 40, "all texts of the batch in one row, kept apart by attention", 14, "#444444")
    top = p.row(40, 170, "q_1 q_2 EOS", (q, q, GREY)) + p.row(
        226, 170, "d_1 d_2 d_3 EOS", (d, d, d, GREY)
    )
    p.box(32, 108, 420, 34, "decoder LLM")
    for x in top:
        p.arrow((x, 169), (x, 145))
    for x, name, colour in ((top[2], "e_Q", q), (top[6], "e_D", d)):
        p.token(x - 23, 56, name, e)
        p.arrow((x, 107), (x, 89), colour=e, width=2.2)
        p.text(x + 32, 76, f"anchor of the {'query' if colour == q else 'document'}", 12, "#8a3c00")
    p.text(28, 250, "Decode", 18, weight="bold")
    p.text(112, 250, "each anchor in the slot before the other text", 14, "#444444")
    low = p.row(40, 384, "e_Q d_1 d_2", (e, d, d)) + p.row(226, 384, "e_D q_1", (e, q))
    out = [
        *zip(low[:3], ("d_1", "d_2", "d_3"), (d, d, d), strict=True),
        *zip(low[3:], ("q_1", "q_2"), (q, q), strict=True),
    ]
    p.box(32, 328, 420, 34, "the same decoder LLM")
    for x in low:
        p.arrow((x, 383), (x, 365))
    for x, name, colour in out:
        p.token(x - 23, 276, name, colour)
        p.arrow((x, 327), (x, 309))
    x = 520
    p.text(x, 284, "L_Q2D", 17, weight="bold")
    p.text(x + 58, 284, "the document, from the query's anchor", 14)
    p.text(x, 316, "L_D2Q", 17, weight="bold")
    p.text(x + 58, 316, "the query, from the document's anchor", 14)
    p.text(x, 362, "L = α · L(Q2D) + (1 − α) · L(D2Q),  α = 0.2", 15, weight="bold")
    p.text(x, 392, "The gradient flows through the anchors into", 14, "#444444")
    p.text(x, 411, "the encode pass; all parameters are trained.", 14, "#444444")
    return p


def contrastive() -> Picture:
    """The scores of a batch in Stage II."""
    p = Picture(
        960,
        400,
        "Stage II: every query against every document of the batch",
        "Queries are rows; columns are the positives of all queries and then their hard negatives. "
        "The diagonal holds each "
        "query's own positive; all other columns of a row are its negatives.",
    )
    size = 4
    left = 150
    top = 108
    step = 58
    p.text(28, 40, "Stage II", 18, QUERY, weight="bold")
    p.text(
        126, 40, "cosine / τ of every query with every document of the whole batch", 14, "#444444"
    )
    for j in range(size):
        p.token(left + j * step, 62, f"d_{j + 1}", DOCUMENT)
        p.token(left + (size + j) * step + 16, 62, f"n_{j + 1}", OTHER)
    for i in range(size):
        y = top + i * 50
        p.token(70, y, f"q_{i + 1}", QUERY)
        for j in range(2 * size):
            own = i == j
            x = left + j * step + (16 if j >= size else 0)
            p.box(
                x,
                y,
                46,
                30,
                "s" if own else "",
                DOCUMENT if own else "#c8c8c8",
                "#00785a" if own else "#f4f4f4",
                "#ffffff",
            )
    p.text(left + 2 * step - 6, 330, "positives: the diagonal", 14, DOCUMENT, "middle", "bold")
    p.text(left + 6 * step + 10, 330, "hard negatives", 14, OTHER, "middle", "bold")
    p.text(
        150,
        366,
        "Everything else in a row competes with the positive, whichever process computed it.",
        14,
        "#444444",
    )
    x = 672
    p.text(x, 124, "InfoNCE", 17, weight="bold")
    for line, words in enumerate(
        (
            "cross-entropy of each row,",
            "the query's own positive is right",
            "",
            "LoRA is trained, the base is frozen",
            "τ = 0.05",
        )
    ):
        p.text(x, 152 + 24 * line, words, 14)
    return p


def refinement() -> Picture:
    """K soft tokens after a text, and the loss at each of them."""
    p = Picture(
        1000,
        400,
        "GIRCSE: soft tokens after a text",
        "The state at the text's end becomes a distribution over the vocabulary; the mean of all "
        "input embeddings under it is "
        "the first soft token, the next input. Its state gives the second, and so on. The vector "
        "after k steps is the mean of "
        "the states at the first k soft tokens, and each has a contrastive loss.",
    )
    p.text(28, 40, "GIRCSE", 18, OTHER, weight="bold")
    p.text(
        116, 40, "the text is continued by K soft tokens before it becomes a vector", 14, "#444444"
    )
    xs = p.row(48, 342, "x_1 x_2 EOS", (QUERY, QUERY, GREY))
    soft = [278, 438, 598]
    for x in xs:
        p.arrow((x, 341), (x, 321))
    for k, x in enumerate(soft, 1):
        p.token(x - 23, 342, f"d_{k}", OTHER)
        p.arrow((x, 341), (x, 321))
        p.token(x - 23, 218, f"g_{k}", GREY)
        p.arrow((x, 281), (x, 251))
        p.token(x - 23, 142, f"z_{k}", VECTOR)
        p.arrow((x, 217), (x, 175), colour=VECTOR, width=2.2)
        p.text(x, 82, f"L_{k}", 17, anchor="middle", weight="bold")
        p.arrow((x, 141), (x, 92), colour=VECTOR, width=2.2)
        if k > 1:
            p.arrow((soft[k - 2], 200), (x - 34, 200), (x - 10, 178), colour=VECTOR)
    p.arrow((xs[-1], 281), (xs[-1], 262), (218, 262), (218, 357), (252, 357), colour=OTHER)
    for before, after in pairwise(soft):
        p.arrow(
            (before + 23, 233),
            (before + 80, 233),
            (before + 80, 357),
            (after - 26, 357),
            colour=OTHER,
        )
    p.box(40, 282, 632, 36, "decoder LLM, with a cache that gradients pass through")
    x = 706
    p.text(x, 88, "a contrastive loss after each step,", 14)
    p.text(x, 107, "and a penalty if a step is worse", 14)
    p.text(x, 154, "mean of the states so far:", 14)
    p.text(x, 173, "the vector after k steps", 14)
    p.text(x, 232, "state → softmax over the vocabulary", 14, OTHER)
    p.text(x, 251, "→ mean input embedding", 14, OTHER)
    p.text(x, 270, "→ the next soft token", 14, OTHER)
    return p


if __name__ == "__main__":
    for draw in (reconstruction, contrastive, refinement):
        (FOLDER / f"{draw.__name__}.svg").write_text(draw().svg(), "utf-8")
