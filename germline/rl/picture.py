"""An animated picture of an episode, as a small GIF."""

import io
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

MAX_FRAMES, MAX_WIDTH, SECONDS = 60, 240, 4.0
MAX_STEPS = 2000  # of an episode that is drawn
failed: set[Any] = set()  # functions that could not draw: MuJoCo's aborts the process if it is called once more


def draw_episode(make: Callable[[], Any], act: Callable[[Any, Any], tuple[Any, Any]], seed: int) -> bytes | None:
    """Play an episode and return it as a GIF, or None where the environment cannot be drawn here.

    Args:
        make: Returns an environment that can be rendered as an array.
        act: Returns the action and the policy's next state, given an observation and its state.
        seed: The seed of the episode.
    """
    try:
        from PIL import Image

        with warnings.catch_warnings(), without_display():
            warnings.simplefilter("ignore")  # of a display that is missing
            return encode_frames(play_frames(make, act, seed), Image)
    except Exception:  # no display, no renderer, no Pillow: a report without a picture
        return None


@contextmanager
def without_display() -> Iterator[None]:
    """Have SDL, with which some environments draw, not look for a display."""
    before = os.environ.get("SDL_VIDEODRIVER")
    os.environ["SDL_VIDEODRIVER"] = "dummy"
    try:
        yield
    finally:
        del os.environ["SDL_VIDEODRIVER"]
        if before is not None:
            os.environ["SDL_VIDEODRIVER"] = before


def play_frames(make: Callable[[], Any], act: Callable[[Any, Any], tuple[Any, Any]], seed: int) -> list[Any]:
    """Return the pictures of all steps of an episode."""
    environment = make()
    draw = getattr(environment.render, "__func__", environment.render)
    try:
        if draw in failed:
            raise RuntimeError("this environment could not be drawn before")
        observation, frames, state = environment.reset(seed=seed)[0], [], None
        for _ in range(MAX_STEPS):
            try:
                frames.append(environment.render())
            except Exception:
                failed.add(draw)
                raise
            action, state = act(observation, state)
            observation, _, terminated, truncated, _ = environment.step(action if np.ndim(action) else int(action))
            if terminated or truncated:
                break
        return frames
    finally:
        environment.close()


def encode_frames(frames: list[Any], image_module: Any) -> bytes:
    """Return some of the frames as a small animated GIF."""
    chosen = [frames[i] for i in np.unique(np.linspace(0, len(frames) - 1, MAX_FRAMES).astype(int))]
    images = [image_module.fromarray(np.asarray(frame, np.uint8)) for frame in chosen]
    size = (min(MAX_WIDTH, images[0].width), images[0].height * min(MAX_WIDTH, images[0].width) // images[0].width)
    images = [image.resize(size).quantize(32) for image in images]
    content = io.BytesIO()
    pause = int(1000 * SECONDS / len(images))
    images[0].save(content, "GIF", save_all=True, append_images=images[1:], duration=pause, loop=0)
    return content.getvalue()
