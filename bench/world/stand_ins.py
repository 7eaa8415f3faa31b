"""Small stand-ins of data sets, in the formats that scripts expect: `python stand_ins.py KIND PATH [--option=value ...]`.

Images are random, texts are Python's own documentation (`pydoc_data.topics`); each is the same whenever it is made.
"""

from __future__ import annotations

import gzip
import random
import re
import struct
import sys
from pathlib import Path

import numpy as np


def topics(path: Path, *, characters: int = 400_000) -> None:
    """A text file of Python's documentation."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text(characters))


def names(path: Path, *, count: int = 8000) -> None:
    """One made-up lower-case name a line (makemore's names.txt)."""
    generator = random.Random(0)
    vowels, consonants = "aeiou", "bcdfghjklmnprstvwyz"
    lines = (
        "".join(generator.choice(consonants) + generator.choice(vowels) for _ in range(generator.randint(1, 5)))
        for _ in range(count)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def corpus(path: Path, *, characters: int = 400_000) -> None:
    """A folder with train.txt, valid.txt and test.txt (WikiText's layout)."""
    path.mkdir(parents=True, exist_ok=True)
    text = _text(characters)
    for name, part in (("train", text), ("valid", text[: characters // 10]), ("test", text[-characters // 10 :])):
        (path / f"{name}.txt").write_text(part)


def mnist(path: Path, *, count: int = 6000, name: str = "MNIST") -> None:
    """torchvision's MNIST or FashionMNIST under `path` as a root: idx files of random digits."""
    folder = path / name / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for part, number in (("train", count), ("t10k", max(1000, count // 6))):
        images = generator.integers(0, 256, size=(number, 28, 28), dtype=np.uint8)
        labels = generator.integers(0, 10, size=number, dtype=np.uint8)
        for stem, kind, data, shape in (("images-idx3", 3, images, (28, 28)), ("labels-idx1", 1, labels, ())):
            head = struct.pack(f">4B{1 + len(shape)}I", 0, 0, 8, kind, number, *shape)
            (folder / f"{part}-{stem}-ubyte").write_bytes(head + data.tobytes())
            with gzip.open(folder / f"{part}-{stem}-ubyte.gz", "wb", compresslevel=1) as file:
                file.write(head + data.tobytes())


def cifar10(path: Path, *, count: int = 5000) -> None:
    """torchvision's CIFAR10 under `path` as a root: pickled batches of random images, with other checksums than the true ones."""
    import pickle

    folder = path / "cifar-10-batches-py"
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        number = count // 5
        entry = {
            "data": generator.integers(0, 256, size=(number, 3072), dtype=np.uint8),
            "labels": generator.integers(0, 10, size=number).tolist(),
        }
        (folder / name).write_bytes(pickle.dumps(entry))
    labels = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": labels}))


def gpt2_bins(path: Path, *, tokens: int = 2_000_000) -> None:
    """nanoGPT's data/openwebtext: train.bin and val.bin of random GPT-2 tokens."""
    path.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for name, number in (("train", tokens), ("val", tokens // 10)):
        generator.integers(0, 50257, size=number, dtype=np.uint16).tofile(path / f"{name}.bin")


def image_folder(path: Path, *, count: int = 200, classes: int = 4, size: int = 256, parts: str = "train,val") -> None:
    """torchvision's ImageFolder: `parts`/class/number.jpg of smooth random images; parts="" for classes at the top."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for part in parts.split(","):
        for index in range(count if part != "val" else max(classes, count // 5)):
            folder = path / part / f"class{index % classes}"
            folder.mkdir(parents=True, exist_ok=True)
            coarse = generator.integers(0, 256, size=(8, 8, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((size, size), Image.BICUBIC).save(folder / f"{index}.jpg", quality=85)


def images(path: Path, *, count: int = 200, size: int = 256, suffix: str = "jpg") -> None:
    """A flat folder of random images."""
    from PIL import Image

    path.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for index in range(count):
        coarse = generator.integers(0, 256, size=(8, 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((size, size), Image.BICUBIC).save(path / f"{index:05d}.{suffix}")


def cifar100(path: Path, *, count: int = 5000) -> None:
    """torchvision's CIFAR100 under `path` as a root, of random images."""
    import pickle

    folder = path / "cifar-100-python"
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for name, number in (("train", count), ("test", count // 5)):
        entry = {
            "data": generator.integers(0, 256, size=(number, 3072), dtype=np.uint8),
            "fine_labels": generator.integers(0, 100, size=number).tolist(),
        }
        (folder / name).write_bytes(pickle.dumps(entry))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [f"class{i}" for i in range(100)]}))


def image_pairs(path: Path, *, count: int = 60, size: int = 256) -> None:
    """A segmentation data set: imgs/number.jpg and masks/number.png of discs, the class as the pixel's value."""
    from PIL import Image, ImageDraw

    generator = random.Random(0)
    images(path / "imgs", count=count, size=size)
    (path / "masks").mkdir(parents=True, exist_ok=True)
    for index in range(count):
        mask = Image.new("L", (size, size))
        x, y, radius = generator.randrange(size), generator.randrange(size), generator.randrange(size // 8, size // 3)
        ImageDraw.Draw(mask).ellipse([x - radius, y - radius, x + radius, y + radius], fill=1)
        mask.save(path / "masks" / f"{index:05d}.png")


def char_bins(path: Path, *, characters: int = 1_000_000) -> None:
    """nanoGPT's data/NAME: train.bin, val.bin and meta.pkl of a text's characters."""
    import pickle

    text = _text(characters)
    letters = sorted(set(text))
    stoi = {letter: index for index, letter in enumerate(letters)}
    data = np.array([stoi[letter] for letter in text], dtype=np.uint16)
    path.mkdir(parents=True, exist_ok=True)
    data[: characters * 9 // 10].tofile(path / "train.bin")
    data[characters * 9 // 10 :].tofile(path / "val.bin")
    meta = {"vocab_size": len(letters), "itos": dict(enumerate(letters)), "stoi": stoi}
    (path / "meta.pkl").write_bytes(pickle.dumps(meta))


def enwik8(path: Path, *, characters: int = 95_000_000) -> None:
    """A gzipped text, as long as the part of enwik8 that training scripts read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(_text(characters).encode()[:characters])


def ett(path: Path, *, rows: int = 17_420) -> None:
    """A CSV of hourly series with seven columns (ETTh1's layout): daily and weekly waves with noise."""
    from datetime import datetime, timedelta

    generator = np.random.default_rng(0)
    hours = np.arange(rows)[:, None]
    phase = generator.uniform(0, 6, size=(2, 7))
    values = np.sin(hours * 2 * np.pi / 24 + phase[0]) + 0.5 * np.sin(hours * 2 * np.pi / 168 + phase[1])
    values = 10 + 5 * values + generator.normal(size=(rows, 7))
    began = datetime(2016, 7, 1)
    lines = ["date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT"]
    for index, row in enumerate(values):
        lines.append(f"{began + timedelta(hours=index)}," + ",".join(f"{value:.4f}" for value in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def glue_metric(path: Path) -> None:
    """A folder that `evaluate.load` takes for the metric of GLUE: accuracy."""
    path.mkdir(parents=True, exist_ok=True)
    (path / f"{path.name}.py").write_text(
        "import datasets\nimport evaluate\n\n\n"
        "class Glue(evaluate.Metric):\n"
        "    def _info(self):\n"
        "        kinds = datasets.Features({k: datasets.Value('int64') for k in ('predictions', 'references')})\n"
        "        return evaluate.MetricInfo(description='', citation='', inputs_description='', features=kinds)\n\n"
        "    def _compute(self, predictions, references):\n"
        "        pairs = list(zip(predictions, references))\n"
        "        return {'accuracy': sum(a == b for a, b in pairs) / len(pairs)}\n"
    )


def glue_pairs(path: Path, *, config: str = "mrpc", count: int = 3600) -> None:
    """A folder that `datasets.load_dataset` takes for GLUE: pairs of sentences with a label (MRPC's columns)."""
    generator = random.Random(0)
    lines = _sentences(2 * count)
    parts = (("train", count), ("validation", count // 9), ("test", count // 9))
    rows = {
        name: [
            {
                "sentence1": generator.choice(lines),
                "sentence2": generator.choice(lines),
                "label": generator.randint(0, 1),
                "idx": i,
            }
            for i in range(number)
        ]
        for name, number in parts
    }
    _write_data_set(path, config, rows)


def instructions(path: Path, *, count: int = 2000, longest: int = 4) -> None:
    """A folder that `datasets.load_dataset` takes for instructions and answers (Alpaca's columns) and a text of both, in which an
    answer has up to `longest` sentences."""
    generator = random.Random(0)
    lines = _sentences(2 * count)
    rows = []
    for _ in range(count):
        asked, answer = generator.choice(lines), " ".join(generator.sample(lines, generator.randint(1, longest)))
        rows.append({"instruction": asked, "input": "", "output": answer, "text": f"{asked}\n{answer}"})
    _write_data_set(path, "default", {"train": rows})


def language_model(
    path: Path,
    *,
    kind: str = "bert",
    width: int = 128,
    layers: int = 2,
    heads: int = 2,
    words: int = 4000,
    head: str = "",
) -> None:
    """A folder that transformers takes for a pretrained model: random weights, a tokenizer trained on Python's documentation.

    `kind` is bert, distilbert, roberta, gpt2 or llama; `head` the class with the head, if not the one for language modelling.
    """
    import torch
    import transformers
    from tokenizers import ByteLevelBPETokenizer, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    torch.manual_seed(0)
    lines = _sentences(4000)
    path.mkdir(parents=True, exist_ok=True)
    if kind in ("bert", "distilbert"):
        special = {
            "unk_token": "[UNK]",
            "pad_token": "[PAD]",
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "mask_token": "[MASK]",
        }
        core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        core.normalizer = normalizers.BertNormalizer(lowercase=True)
        core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        core.train_from_iterator(
            lines, trainers.WordPieceTrainer(vocab_size=words, special_tokens=list(special.values()))
        )
        ids = [(name, core.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
        core.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
        )
    else:
        special = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
        if kind == "roberta":
            special = {
                "unk_token": "<unk>",
                "pad_token": "<pad>",
                "cls_token": "<s>",
                "sep_token": "</s>",
                "mask_token": "<mask>",
            }
            special |= {"bos_token": "<s>", "eos_token": "</s>"}
        trained = ByteLevelBPETokenizer()
        trained.train_from_iterator(lines, vocab_size=words, special_tokens=sorted(set(special.values())))
        core = trained._tokenizer
        if kind == "roberta":
            ids = [(name, core.token_to_id(name)) for name in ("<s>", "</s>")]
            core.post_processor = processors.TemplateProcessing(
                single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=ids
            )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=512, **special)
    tokenizer.save_pretrained(path)
    vocabulary = len(tokenizer)
    common = {"vocab_size": vocabulary, "pad_token_id": tokenizer.pad_token_id}
    stack = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }
    if kind == "bert":
        config = transformers.BertConfig(**common, **stack)
    elif kind == "roberta":
        config = transformers.RobertaConfig(**common, **stack, max_position_embeddings=514)
    elif kind == "distilbert":
        config = transformers.DistilBertConfig(
            **common, dim=width, n_layers=layers, n_heads=heads, hidden_dim=4 * width
        )
    else:
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        if kind == "gpt2":
            config = transformers.GPT2Config(vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=heads, **ends)
        else:
            config = transformers.LlamaConfig(vocab_size=vocabulary, **stack, max_position_embeddings=2048, **ends)
    usual = "AutoModelForCausalLM" if kind in ("gpt2", "llama") else "AutoModelForMaskedLM"
    getattr(transformers, head or usual).from_config(config).save_pretrained(path)


def nanogpt_checkpoint(
    path: Path, *, data: str = "shakespeare_char", layers: int = 6, width: int = 384, heads: int = 6
) -> None:
    """nanoGPT's OUT/ckpt.pt with random weights, for its model.py beside OUT and the meta.pkl of its data."""
    import pickle

    import torch

    sys.path.insert(0, str(path.parent))
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    torch.manual_seed(0)
    letters = pickle.loads((path.parent / "data" / data / "meta.pkl").read_bytes())["vocab_size"]
    sizes = {"n_layer": layers, "n_head": heads, "n_embd": width, "block_size": 256, "vocab_size": letters}
    settings = {**sizes, "bias": False, "dropout": 0.0}
    path.mkdir(parents=True, exist_ok=True)
    state = GPT(GPTConfig(**settings)).state_dict()
    torch.save({"model_args": settings, "model": state, "config": {"dataset": data}}, path / "ckpt.pt")


def sentence_rows(path: Path, *, count: int = 1000) -> None:
    """A folder with train.csv, validation.csv and test.csv: a text of some sentences and a label of 0 or 1."""
    import csv

    generator = random.Random(0)
    lines = _sentences(2000)
    path.mkdir(parents=True, exist_ok=True)
    for name, number in (("train", count), ("validation", count // 5), ("test", count // 5)):
        with (path / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            for _ in range(number):
                writer.writerow([" ".join(generator.sample(lines, generator.randint(3, 20))), generator.randint(0, 1)])


def sentences(path: Path, *, count: int = 10_000) -> None:
    """A text file with one sentence a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(_sentences(count)) + "\n")


def sentence_set(path: Path, *, config: str = "pair", columns: str = "anchor,positive", count: int = 5000) -> None:
    """A folder that `datasets.load_dataset` takes: each column a sentence, the column `score` a number from 0 to 1."""
    generator = random.Random(0)
    lines = _sentences(count)
    one = lambda name: generator.random() if name == "score" else generator.choice(lines)  # noqa: E731
    parts = (("train", count), ("validation", count // 5), ("test", count // 5))
    _write_data_set(path, config, {n: [{c: one(c) for c in columns.split(",")} for _ in range(k)] for n, k in parts})


def thucnews(path: Path) -> None:
    """THUCNews' train.txt out of the dev.txt and test.txt that the repository brings."""
    lines = [line for name in ("dev", "test") for line in (path.parent / f"{name}.txt").read_text().splitlines()]
    random.Random(0).shuffle(lines)
    path.write_text("\n".join(lines) + "\n")


def token_bins(path: Path, *, shards: int = 3, tokens: int = 200_000, vocabulary: int = 2048) -> None:
    """A folder of shards of random tokens as uint16, each story begun by token 1 (llama2.c's data)."""
    path.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for shard in range(shards):
        data = generator.integers(3, vocabulary, size=tokens, dtype=np.uint16)
        data[::200] = 1
        data.tofile(path / f"data{shard:02d}.bin")


def word_model(
    path: Path, *, kind: str = "LSTM", data: str = "data/wikitext-2", width: int = 200, layers: int = 2
) -> None:
    """The model.pt of PyTorch's word_language_model example with random weights, for its model.py in the same folder."""
    import torch

    sys.path.insert(0, str(path.parent))
    import data as texts  # type: ignore[import-not-found]
    import model as models  # type: ignore[import-not-found]

    torch.manual_seed(0)
    count = len(texts.Corpus(str(path.parent / data)).dictionary)
    if kind == "Transformer":
        model = models.TransformerModel(count, width, 2, width, layers, 0.2)
    else:
        model = models.RNNModel(kind, count, width, width, layers, 0.2)
    torch.save(model, path)


def _sentences(count: int) -> list[str]:
    lines = [" ".join(part.split()) for part in _text(400_000).replace("\n\n", ". ").split(". ")]
    lines = [line for line in lines if 20 <= len(line) <= 300]
    return (lines * (1 + count // len(lines)))[:count]


def _write_data_set(path: Path, config: str, rows: dict[str, list[dict[str, object]]]) -> None:
    """JSON lines under a README that names them, as `datasets` reads a folder."""
    import json

    (path / config).mkdir(parents=True, exist_ok=True)
    head = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n"
    for name, entries in rows.items():
        (path / config / f"{name}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        head += f"  - split: {name}\n    path: {config}/{name}.jsonl\n"
    (path / "README.md").write_text(head + "---\n")


def cora(path: Path, *, nodes: int = 2708, features: int = 1433, edges: int = 5429) -> None:
    """Cora's files as LINQS gives them under `path`: cora.content (node, words, class) and cora.cites, of a random graph."""
    path.mkdir(parents=True, exist_ok=True)
    kinds = ["Case_Based", "Genetic_Algorithms", "Neural_Networks", "Probabilistic_Methods", "Rule_Learning", "Theory"]
    kinds.append("Reinforcement_Learning")
    generator = np.random.default_rng(0)
    words = (generator.random((nodes, features)) < 0.0127).astype(int).astype(str)
    lines = ("\t".join([str(1000 + i), *row, kinds[i % 7]]) for i, row in enumerate(words))
    (path / "cora.content").write_text("\n".join(lines) + "\n")
    pairs = 1000 + generator.integers(0, nodes, size=(edges, 2))
    (path / "cora.cites").write_text("".join(f"{a}\t{b}\n" for a, b in pairs if a != b))


def criteo(path: Path, *, count: int = 40_000) -> None:
    """Criteo's train.txt: label, thirteen counts and 26 hashed categories a line between tabs, some of them missing."""
    generator = np.random.default_rng(0)
    table = [generator.integers(0, 2, size=count).astype(str)]
    for _ in range(13):
        table.append(np.where(generator.random(count) < 0.2, "", generator.geometric(0.02, size=count).astype(str)))
    for index in range(26):
        size = (10, 100, 1000, 10_000)[index % 4]
        names = np.array([f"{n:08x}" for n in generator.integers(0, 2**32, size=size)])
        table.append(np.where(generator.random(count) < 0.1, "", names[generator.zipf(1.3, size=count) % size]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join("\t".join(row) for row in zip(*table, strict=True)) + "\n")


def elevators(path: Path, *, count: int = 16_599) -> None:
    """A table of UCI's elevators in MATLAB's format: eighteen columns and a target."""
    from scipy.io import savemat

    generator = np.random.default_rng(0)
    data = generator.normal(size=(count, 19))
    data[:, -1] = np.sin(data[:, :18].sum(1)) + 0.1 * data[:, -1]
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {"data": data})


def gymnasium_as_gym(path: Path) -> None:
    """A module `gym` that is its successor: gym's last release does not work with NumPy 2."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        '"""gym under its present name."""\n\nimport sys\n\nimport gymnasium\n\nsys.modules["gym"] = gymnasium\n'
    )


def interactions(path: Path, *, users: int = 6040, items: int = 3416, shortest: int = 20, longest: int = 400) -> None:
    """One 'user item' a line in each user's order of time, as SASRec's ml-1m.txt."""
    generator = np.random.default_rng(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for user in range(1, users + 1):
            count = min(longest, shortest + int(generator.exponential(140)))
            file.writelines(f"{user} {item}\n" for item in generator.choice(items, size=count, replace=False) + 1)


def knowledge_graph(path: Path, *, entities: int = 14_541, relations: int = 237, count: int = 60_000) -> None:
    """train.txt, valid.txt and test.txt of head, relation, tail (FB15k-237's layout)."""
    path.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for name, number in (("train", count), ("valid", 1000), ("test", 1000)):
        heads, tails = generator.integers(0, entities, size=(2, number))
        kinds = generator.integers(0, relations, size=number)
        lines = (f"/m/{h}\t/relation/{r}\t/m/{t}\n" for h, r, t in zip(heads, kinds, tails, strict=True))
        (path / f"{name}.txt").write_text("".join(lines))


def modelnet(path: Path, *, count: int = 120, points: int = 10_000, classes: int = 40) -> None:
    """ModelNet40 with normals, resampled: lists of names and one text file of points a shape."""
    path.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    pool = [",".join(f"{v:.6f}" for v in row) for row in generator.uniform(-1, 1, size=(4 * points, 6))]
    kinds = [f"shape{i}" for i in range(classes)]
    (path / f"modelnet{classes}_shape_names.txt").write_text("\n".join(kinds) + "\n")
    for part, number in (("train", count), ("test", max(classes, count // 4))):
        names = []
        for index in range(number):
            kind = kinds[index % classes]
            names.append(f"{kind}_{part}{index:04d}")
            (path / kind).mkdir(exist_ok=True)
            start = int(generator.integers(0, 3 * points))
            (path / kind / f"{names[-1]}.txt").write_text("\n".join(pool[start : start + points]) + "\n")
        (path / f"modelnet{classes}_{part}.txt").write_text("\n".join(names) + "\n")


def notebook(path: Path, *, source: str, before: str = "") -> None:
    """The code cells of a notebook that lies beside `path` as one script, without the lines that only a notebook understands."""
    import json

    lines = [before]
    for cell in json.loads((path.parent / source).read_text())["cells"]:
        if cell["cell_type"] == "code":
            lines += "".join(cell["source"]).replace("%time ", "").splitlines()
    path.write_text("\n".join(line for line in lines if not line.lstrip().startswith(("%", "!"))) + "\n")


def fenced_block(
    path: Path, *, source: str, block: int = 0, before: str = "", find: str = "", replace: str = ""
) -> None:
    """One of the Python blocks of a Markdown file that lies beside `path`, as a script, after lines that make its data.

    `find` and `replace` switch off what wants a network.
    """
    blocks = re.findall(r"^```python\n(.*?)^```", (path.parent / source).read_text(), flags=re.MULTILINE | re.DOTALL)
    if find not in blocks[block]:
        raise SystemExit(f"block {block} of {source} has no '{find}'")
    text = blocks[block].replace(find, replace) if find else blocks[block]
    path.write_text(f"{before.strip()}\n{text}")


def planetoid(path: Path, *, name: str = "cora", nodes: int = 2708, features: int = 1433, classes: int = 7) -> None:
    """Planetoid's raw files of a citation graph (ind.NAME.x, .graph and so on) under `path`."""
    import pickle

    from scipy.sparse import csr_matrix

    path.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    words = csr_matrix((generator.random((nodes, features)) < 0.0127).astype(np.float32))
    labels = np.eye(classes, dtype=np.int32)[generator.integers(0, classes, size=nodes)]
    known, first = nodes - 1000, 20 * classes
    graph: dict[int, list[int]] = {i: [] for i in range(nodes)}
    for a, b in generator.integers(0, nodes, size=(2 * nodes, 2)).tolist():
        graph[a].append(b)
        graph[b].append(a)
    parts = {"x": words[:first], "y": labels[:first], "tx": words[known:], "ty": labels[known:]}
    parts |= {"allx": words[:known], "ally": labels[:known], "graph": graph}
    for part, value in parts.items():
        (path / f"ind.{name}.{part}").write_bytes(pickle.dumps(value))
    (path / f"ind.{name}.test.index").write_text(
        "\n".join(map(str, generator.permutation(np.arange(known, nodes)))) + "\n"
    )


def tu_graphs(path: Path, *, name: str, count: int = 600, kinds: int = 3) -> None:
    """A data set of small labelled graphs in TU Dortmund's format under `path` (NAME_A.txt, NAME_graph_indicator.txt ...)."""
    path.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    edges, graph_of, kind_of = [], [], []
    for graph in range(1, count + 1):
        first, number = len(graph_of) + 1, int(generator.integers(10, 60))
        graph_of += [graph] * number
        kind_of += generator.integers(0, kinds, size=number).tolist()
        links = [(i, int(generator.integers(0, i))) for i in range(1, number)]
        links += [(int(a), int(b)) for a, b in generator.integers(0, number, size=(number, 2)) if a != b]
        for a, b in sorted({(first + a, first + b) for a, b in links} | {(first + b, first + a) for a, b in links}):
            edges.append(f"{a}, {b}")
    (path / f"{name}_A.txt").write_text("\n".join(edges) + "\n")
    (path / f"{name}_graph_indicator.txt").write_text("\n".join(map(str, graph_of)) + "\n")
    (path / f"{name}_node_labels.txt").write_text("\n".join(map(str, kind_of)) + "\n")
    labels = generator.integers(0, 2, size=count)
    (path / f"{name}_graph_labels.txt").write_text("\n".join(map(str, labels)) + "\n")


def gym_as_before(path: Path) -> None:
    """A module `gym`: gymnasium under gym's calls of before 0.26, a state from `reset` and four values from `step`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        '"""gymnasium under the calls of gym 0.21."""\n\n'
        "import gymnasium\n"
        "from gymnasium import Env, spaces, wrappers  # noqa: F401\n\n\n"
        "class _Before(gymnasium.Wrapper):\n"
        "    _seed = None\n\n"
        "    @property\n"
        "    def _max_episode_steps(self):\n"
        "        return self.env.spec.max_episode_steps\n\n"
        "    def seed(self, seed=None):\n"
        "        self._seed = seed\n\n"
        "    def reset(self, **options):\n"
        "        seed, self._seed = self._seed, None\n"
        "        return self.env.reset(seed=seed, **options)[0]\n\n"
        "    def step(self, action):\n"
        "        state, reward, is_over, is_cut, info = self.env.step(action)\n"
        "        return state, reward, is_over or is_cut, info\n\n\n"
        "def make(name, **options):\n"
        "    return _Before(gymnasium.make(name, **options))\n"
    )


def gin_graphs(path: Path, *, count: int = 600, kinds: int = 7) -> None:
    """Labelled graphs as powerful-gnns reads them: a count, nodes and label, then tag, degree and neighbours of each node."""
    generator = np.random.default_rng(0)
    lines = [str(count)]
    for graph in range(count):
        number = int(generator.integers(10, 40))
        near: list[set[int]] = [set() for _ in range(number)]
        links = [(i, int(generator.integers(0, i))) for i in range(1, number)]
        for a, b in links + generator.integers(0, number, size=(number // 2, 2)).tolist():
            if a != b:
                near[a].add(b)
                near[b].add(a)
        lines.append(f"{number} {graph % 2}")
        for node in near:
            lines.append(" ".join(map(str, [int(generator.integers(0, kinds)), len(node), *sorted(node)])))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def vgg_weights(path: Path) -> None:
    """torchvision's VGG16 with random weights as its file of pretrained ones (hub/checkpoints under TORCH_HOME)."""
    import torch
    from torchvision.models import vgg16

    torch.manual_seed(0)
    with torch.device("meta"):
        state = vgg16().state_dict()
    for name, like in state.items():
        if name.startswith("classifier"):
            state[name] = torch.zeros(1).expand(like.shape)  # one number in the file
        else:
            scale = (2 / like[0].numel()) ** 0.5 if like.dim() == 4 else 0.0
            state[name] = torch.randn(like.shape) * scale
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)


def _text(characters: int) -> str:
    from pydoc_data import topics as documentation

    text = "\n".join(documentation.topics[key] for key in sorted(documentation.topics))
    return (text * (1 + characters // len(text)))[:characters]


def main() -> None:
    kind, path, *options = sys.argv[1:]
    given = dict(option.removeprefix("--").split("=", 1) for option in options)
    globals()[kind](
        Path(path), **{key: int(value) if value.lstrip("-").isdigit() else value for key, value in given.items()}
    )


if __name__ == "__main__":
    main()
