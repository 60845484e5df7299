"""Chats about two pictures with tiny-vision, which knows coloured shapes, and nothing else.

The second question about a picture is answered without looking again: the picture's KV is in the cache.

python examples/image_chat.py
"""

from PIL import Image, ImageDraw

from mlserve import LLM, SamplingParams

QUESTIONS = ("What colour is the shape?", "What shape is it?")


def red_circle() -> Image.Image:
    image = Image.new("RGB", (256, 256), (40, 40, 50))
    ImageDraw.Draw(image).ellipse((60, 50, 200, 190), fill=(220, 30, 30))
    return image


def yellow_triangle() -> Image.Image:
    image = Image.new("RGB", (192, 192), (90, 85, 80))
    ImageDraw.Draw(image).polygon([(100, 25), (165, 140), (35, 140)], fill=(240, 220, 40))
    return image


def ask_about(image: Image.Image, llm: LLM) -> list[str]:
    """One conversation: all questions, each after the answer to the one before."""
    messages: list[dict[str, object]] = []
    answers: list[str] = []
    for question in QUESTIONS:
        content: list[dict[str, object]] = [{"type": "text", "text": question}]
        if not messages:
            content.insert(0, {"type": "image", "image": image})
        messages.append({"role": "user", "content": content})
        output = llm.chat(messages, SamplingParams(max_tokens=8))[0]
        answers.append(output.outputs[0].text)
        messages.append({"role": "assistant", "content": answers[-1]})
        metrics = output.metrics
        print(f"{question} {answers[-1]}\n  first token after {metrics.time_to_first_token:.3f} s; ", end="")
        print(f"{metrics.cached_tokens} of {metrics.prompt_tokens} prompt tokens came from the cache")
    return answers


def main() -> list[list[str]]:
    """Run it; returns the answers about each picture."""
    llm = LLM(model="tiny-vision", enable_prefix_caching=True)
    return [ask_about(image, llm) for image in (red_circle(), yellow_triangle())]


if __name__ == "__main__":
    main()
