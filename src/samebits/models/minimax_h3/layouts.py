"""Packed layouts: which row of the sequence is what, where it sits in time and space, and which timestep it has.

The rules are those of the MiniMax-H3 pipeline of diffusers 0.42.1 (``build_packed_sequence``,
``build_ref2va_packed_sequence``, ``build_row_timesteps``), written again in Python's IEEE doubles, one rounding per
operation, so that no library decides a bit. ``peer`` has the pipeline's own functions; the tests compare the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

VIDEO, TEXT, AUDIO = 0, 1, 2
PATCH = (1, 2, 2)
AUDIO_CHANNELS = 2
SPATIAL_SCALE = 32.0
FRAME_TIME = 5.0 / 3.0
FRAMES_PER_LATENT = (1, 4, 4, 4, 4)
"""The VAE turns 17 frames into 5 latent frames; a latent frame lasts ``FRAME_TIME`` times its number of frames."""
Anchor = Literal["first", "last"]
Position = tuple[float, float, float]


@dataclass(frozen=True)
class Packed:
    """One packed sequence of S rows, all tensors on the CPU."""

    position_ids: Tensor
    """(S, 3) float64: time, height, width."""
    token_tags: Tensor
    """(S,) int64: 0 video, 1 text, 2 audio."""
    video_indices: Tensor
    """Rows of video, conditions first; int64, as the two below."""
    audio_indices: Tensor
    text_indices: Tensor
    condition_video_rows: int
    condition_audio_rows: int

    def __len__(self) -> int:
        return len(self.token_tags)


@dataclass(frozen=True)
class Reference:
    """One reference of a Ref2VA request: an image, a video with or without a soundtrack, or audio alone."""

    kind: Literal["image", "video", "audio"]
    latent_frames: int = 0
    """Of a video; an image is one frame."""
    latent_height: int = 0
    latent_width: int = 0
    audio_latents: int = 0


# --- positions --------------------------------------------------------------------------------------------------------


def _axis(size: int, patch: int, root_area: float) -> list[float]:
    """Left ends of ``size // patch`` equal cells of an interval of length size / root_area around 1/2, times 32."""
    ratio = size / root_area
    left = (1.0 - ratio) / 2.0
    count = size // patch
    step = ((left + ratio) - left) / count
    return [(i * step + left) * SPATIAL_SCALE for i in range(count)]


@dataclass(frozen=True)
class _Grid:
    """Patches of one latent frame, row-major."""

    heights: list[float]
    widths: list[float]

    @classmethod
    def of(cls, height: int, width: int) -> _Grid:
        if height < PATCH[1] or width < PATCH[2]:
            raise ValueError(f"a latent frame of {height} x {width} has no patch of {PATCH[1]} x {PATCH[2]}")
        root = math.sqrt(height * width)
        return cls(_axis(height, PATCH[1], root), _axis(width, PATCH[2], root))

    def __len__(self) -> int:
        return len(self.heights) * len(self.widths)

    def at(self, time: float) -> list[Position]:
        return [(time, h, w) for h in self.heights for w in self.widths]


def _spans(frames: int) -> list[float]:
    return [FRAME_TIME * FRAMES_PER_LATENT[i % len(FRAMES_PER_LATENT)] for i in range(frames)]


def _video(frames: int, grid: _Grid, origin: float) -> list[Position]:
    starts = [0.0, *accumulate(_spans(frames)[:-1])]
    return [row for start in starts[:frames] for row in grid.at(origin + start)]


def _audio(latents: int, origin: float, widths: Sequence[float]) -> list[Position]:
    """Channel-major: the first channel at the left end of the picture, every further one at the right end."""
    ends = [widths[0]] + [widths[-1]] * (AUDIO_CHANNELS - 1)
    return [(origin + i, 0.0, end) for end in ends for i in range(latents)]


def pairwise_sum(terms: Sequence[float]) -> float:
    """The order of ``numpy.sum``: eight running sums up to 128 terms, halves (of whole eights) beyond."""
    count = len(terms)
    if count < 8:
        return _chain([0.0, *terms])
    if count > 128:
        half = count // 2
        half -= half % 8
        return pairwise_sum(terms[:half]) + pairwise_sum(terms[half:])
    whole = count - count % 8
    r = [_chain(terms[lane:whole:8]) for lane in range(8)]
    return _chain([((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7])), *terms[whole:]])


def _chain(terms: Sequence[float]) -> float:
    """One addition after the other. ``sum`` of Python 3.12 compensates, which is another result."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


# --- requests ---------------------------------------------------------------------------------------------------------


def pack(
    text_tags: Sequence[int],
    latent_frames: int,
    latent_height: int,
    latent_width: int,
    audio_latents: int,
    anchors: Sequence[Anchor] = (),
) -> Packed:
    """``[text | keyframe conditions | audio | video]``, the layout of text-to-video and of keyframes to video.

    Args:
        text_tags: one per text row: 1, or 0 in the vision block of a keyframe.
        latent_frames, latent_height, latent_width: of the video to be made, in latents (pixels / 16).
        audio_latents: per channel; both channels are packed one after the other.
        anchors: one ``"first"`` or ``"last"`` per keyframe.

    Raises:
        ValueError: another anchor, no frame, or a frame without a patch.
    """
    _need_frames(latent_frames)
    grid = _Grid.of(latent_height, latent_width)
    origin = float(len(text_tags))
    times = {"first": origin, "last": origin + pairwise_sum(_spans(latent_frames)) - FRAME_TIME}
    rows = _Rows(text_tags)
    for anchor in anchors:
        if anchor not in times:
            raise ValueError(f"anchor {anchor!r}: expected 'first' or 'last'")
        rows.add(VIDEO, grid.at(times[anchor]))
    conditions = len(anchors) * len(grid)
    rows.add(AUDIO, _audio(audio_latents, origin, grid.widths))
    rows.add(VIDEO, _video(latent_frames, grid, origin))
    return rows.packed(conditions, 0)


def pack_references(
    text_tags: Sequence[int],
    references: Sequence[Reference],
    latent_frames: int,
    latent_height: int,
    latent_width: int,
    audio_latents: int,
) -> Packed:
    """``[text | reference blocks | audio | video]``, the layout of references to video; other arguments as :func:`pack`.

    One clock runs from the text on: every block starts where the one before it ended.
    """
    _need_frames(latent_frames)
    grid = _Grid.of(latent_height, latent_width)
    clock = float(len(text_tags))
    rows = _Rows(text_tags)
    for reference in references:
        if reference.kind == "audio":
            rows.add(AUDIO, _audio(reference.audio_latents, clock, grid.widths))
            clock += float(reference.audio_latents)
            continue
        if reference.kind not in ("image", "video"):
            raise ValueError(f"reference kind {reference.kind!r}: expected 'image', 'video' or 'audio'")
        own = _Grid.of(reference.latent_height, reference.latent_width)
        if reference.kind == "image":
            rows.add(VIDEO, own.at(clock))
            clock += 1.0
        else:
            _need_frames(reference.latent_frames)
            rows.add(AUDIO, _audio(reference.audio_latents, clock, own.widths))
            rows.add(VIDEO, _video(reference.latent_frames, own, clock))
            clock += max(float(reference.audio_latents), _chain([0.0, *_spans(reference.latent_frames)]))
    conditions = (rows.count(VIDEO), rows.count(AUDIO))
    rows.add(AUDIO, _audio(audio_latents, clock, grid.widths))
    rows.add(VIDEO, _video(latent_frames, grid, clock))
    return rows.packed(*conditions)


def _need_frames(latent_frames: int) -> None:
    if latent_frames < 1:
        raise ValueError(f"{latent_frames} latent frames: expected at least 1")


class _Rows:
    """Rows in packed order. Text rows keep the tags they were given, whatever those say."""

    def __init__(self, text_tags: Sequence[int]) -> None:
        self.tags = [int(tag) for tag in text_tags]
        self.text = len(self.tags)
        self.positions: list[Position] = [(float(i), 0.0, 0.0) for i in range(self.text)]
        self.indices: dict[int, list[int]] = {VIDEO: [], AUDIO: []}

    def add(self, tag: int, positions: Sequence[Position]) -> None:
        start = len(self.positions)
        self.positions += positions
        self.tags += [tag] * len(positions)
        self.indices[tag] += range(start, len(self.positions))

    def count(self, tag: int) -> int:
        return len(self.indices[tag])

    def packed(self, condition_video_rows: int, condition_audio_rows: int) -> Packed:
        return Packed(
            position_ids=torch.tensor(self.positions, dtype=torch.float64).reshape(-1, 3),
            token_tags=torch.tensor(self.tags, dtype=torch.int64),
            video_indices=torch.tensor(self.indices[VIDEO], dtype=torch.int64),
            audio_indices=torch.tensor(self.indices[AUDIO], dtype=torch.int64),
            text_indices=torch.arange(self.text),
            condition_video_rows=condition_video_rows,
            condition_audio_rows=condition_audio_rows,
        )


def row_timesteps(
    packed: Packed, video: float, audio: float, condition_video: float = 0.999, condition_audio: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The distinct timesteps (T,) FP32, ascending, and the index of every row into them (S,) int64.

    Text has the timestep of the video; conditions have their own, whatever the others do.
    """
    rows = [video] * len(packed)
    for index in packed.video_indices[: packed.condition_video_rows].tolist():
        rows[index] = condition_video
    for count, index in enumerate(packed.audio_indices.tolist()):
        rows[index] = condition_audio if count < packed.condition_audio_rows else audio
    values = [float(value) for value in torch.tensor(rows, dtype=torch.float32)]
    distinct = sorted(set(values))
    place = {value: i for i, value in enumerate(distinct)}
    return torch.tensor(distinct, dtype=torch.float32), torch.tensor([place[value] for value in values])


@dataclass(frozen=True)
class Request:
    """A keyframes-to-video request whose rows all have tag 1 in the text."""

    text: int
    anchors: tuple[Anchor, ...]
    latent_height: int
    latent_width: int
    latent_frames: int
    audio_latents: int

    def pack(self) -> Packed:
        return pack(
            [TEXT] * self.text,
            self.latent_frames,
            self.latent_height,
            self.latent_width,
            self.audio_latents,
            self.anchors,
        )


NAMED = {
    "mini": Request(5, ("first",), 4, 4, 2, 3),
    "tiny": Request(46, ("first", "last"), 8, 8, 7, 37),
    "small": Request(80, ("first",), 10, 22, 12, 65),
    "medium": Request(48, ("first", "last"), 22, 28, 17, 93),
}
"""S = 23, 264, 925 and 3160, with video at t = 0.25, audio at 0.5 and conditions at 0.999, so that T = 3."""
NAMED_TIMESTEPS = (0.25, 0.5)


def named(name: str) -> tuple[Packed, Tensor, Tensor]:
    """A layout of ``NAMED`` with its timesteps (T,) and timestep indices (S,)."""
    if name not in NAMED:
        raise ValueError(f"no layout named {name!r}; choose one of {', '.join(NAMED)}")
    packed = NAMED[name].pack()
    return packed, *row_timesteps(packed, *NAMED_TIMESTEPS)


# --- synthetic layouts, of any S and T --------------------------------------------------------------------------------


def timesteps(count: int, seed: int) -> Tensor:
    """(T,) FP32 in [0, 1] from torch's CPU generator; the first is 0 and, of several, the last is 1."""
    if count < 1:
        raise ValueError(f"{count} timesteps: expected at least 1")
    values = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    values[0] = 0.0
    if count > 1:
        values[-1] = 1.0
    return values


def interleaved(seq_len: int, num_timesteps: int, seed: int) -> tuple[Tensor, Tensor]:
    """Timestep indices and tags (S,) int64, both at random row by row; the first three tags are 0, 1, 2."""
    if seq_len < 1 or num_timesteps < 1:
        raise ValueError(f"{seq_len} rows with {num_timesteps} timesteps: expected at least 1 of each")
    generator = torch.Generator().manual_seed(seed)
    tags = torch.randint(0, 3, (seq_len,), generator=generator)
    indices = torch.randint(0, num_timesteps, (seq_len,), generator=generator)
    tags[:3] = torch.arange(3)[:seq_len]
    return indices, tags


def block(seq_len: int, num_timesteps: int, seed: int) -> tuple[Tensor, Tensor]:
    """Timestep indices and tags (S,) int64: one run of rows per timestep, in it 1/20 text, then video, then 3/20 audio."""
    if num_timesteps < 1 or seq_len < num_timesteps:
        raise ValueError(
            f"{seq_len} rows cannot have a run for each of {num_timesteps} timesteps: expected a row for each, and at least 1"
        )
    generator = torch.Generator().manual_seed(seed)
    cuts = (1 + torch.randperm(seq_len - 1, generator=generator)[: num_timesteps - 1]).sort().values.tolist()
    indices = torch.empty(seq_len, dtype=torch.int64)
    tags = torch.full((seq_len,), VIDEO, dtype=torch.int64)
    for run, (start, stop) in enumerate(zip([0, *cuts], [*cuts, seq_len], strict=True)):
        length = stop - start
        indices[start:stop] = run
        tags[start : start + length // 20] = TEXT
        tags[stop - 3 * length // 20 : stop] = AUDIO
    return indices, tags


SYNTHETIC = {"interleaved": interleaved, "block": block}
