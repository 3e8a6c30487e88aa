"""Builds small public architectures, with inputs, from whatever the installed packages offer.

Classes and their settings are found in the packages, and made small by the names of the settings; no architecture is
listed by hand. What cannot be built in this way is reported as not built.
"""

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 4
MAX_PARAMETERS = 12_000_000
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Built = tuple[nn.Module, Inputs]


def read_settings(text: str) -> dict[str, Any]:
    """Return settings that are written as names and their values: ``a=1 b=(1,2)``."""
    pairs = (item.partition("=") for item in text.split())
    return {name: ast.literal_eval(value) for name, _, value in pairs}


# The settings of a small network, by the names that configurations and constructors have for them.
SIZES = {
    2: "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_encoder_layers depth "
    "num_blocks num_decoder_layers decoder_num_hidden_layers num_key_value_heads n_kv_heads kv_heads "
    "num_experts_per_tok",
    4: "num_attention_heads n_head n_heads num_heads heads encoder_attention_heads decoder_attention_heads nhead "
    "decoder_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts",
    8: "head_dim dim_head d_kv attention_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim kv_lora_rank "
    "q_lora_rank patch_size",
    10: "num_classes num_labels",
    16: "num_mel_bins",
    32: "hidden_size d_model n_embd embed_dim dim width hidden_dim embedding_size word_embed_proj_dim embed_dims "
    "projection_dim text_dim encoder_dim conv_hidden_size decoder_hidden_size cross_attention_dim "
    "moe_intermediate_size shared_expert_intermediate_size image_size img_size sample_size input_size",
    64: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff mlp_dim n_inner decoder_intermediate_size "
    "ffn_hidden_size max_position_embeddings n_positions max_seq_len max_target_positions",
    99: "vocab_size text_vocab_size num_tokens",
}
SMALL: dict[str, Any] = {name: size for size, names in SIZES.items() for name in names.split()}
SHALLOW = {name: SMALL[name] for name in SMALL if "layer" in name or name in ("depth", "vocab_size", "num_experts")}


def load(name: str) -> Any:
    """Import a module of a package."""
    return importlib.import_module(name)


def fill(function: Callable[..., Any], values: dict[str, Any], required: bool = False) -> dict[str, Any]:
    """Return those values that a function takes by name, or only those that it needs."""
    parameters = inspect.signature(function).parameters
    empty = inspect.Parameter.empty
    return {
        name: values[name] for name, p in parameters.items() if name in values and (not required or p.default is empty)
    }


def find_inputs(module: nn.Module, candidates: Iterable[Inputs]) -> Built:
    """Return a module in evaluation mode, and the first inputs that it accepts."""
    module, problem = module.eval(), ValueError("No inputs are known for it.")
    for args, kwargs in candidates:
        try:
            with torch.no_grad():
                module(*args, **kwargs)
            return module, (args, kwargs)
        except Exception as error:
            problem = error if isinstance(error, ValueError) else ValueError(f"{type(error).__name__}: {error}")
    raise problem


def try_tensors(module: nn.Module, tensors: Iterable[Tensor]) -> Built:
    """Return a module, and the first of some tensors that it accepts."""
    return find_inputs(module, (((tensor,), {}) for tensor in tensors))


def images(*sizes: int, channels: int = 3) -> Iterator[Tensor]:
    """Yield random images of several sizes."""
    return (torch.randn(BATCH, channels, size, size) for size in sizes)


def build_small(make: Callable[[], Any]) -> nn.Module:
    """Return a new module, or raise ValueError if it would be large."""
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in make().parameters())
    except (RuntimeError, NotImplementedError):  # it computes with its weights
        count = 0
    if count > MAX_PARAMETERS:
        raise ValueError(f"It has {count:,} parameters.")
    module: nn.Module = make()
    return module


# transformers: every configuration that has a model, and every language model


@cache
def list_transformers() -> dict[str, str]:
    """Return the kinds of configurations by the names of their models."""
    load("transformers.modeling_utils")  # which every model needs
    auto, mapping = load("transformers.models.auto.modeling_auto"), load("transformers").CONFIG_MAPPING
    names: dict[str, str] = {}
    for table in (auto.MODEL_MAPPING_NAMES, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        for kind, models in table.items():
            if kind in mapping:
                names.setdefault(models if isinstance(models, str) else models[0], kind)
    return names


def build_transformers(name: str) -> Built:
    """Return a model of transformers."""
    library = load("transformers")
    config_class, model_class = library.CONFIG_MAPPING[list_transformers()[name]], getattr(library, name)
    problems: list[Exception] = []
    headless = {key: value for key, value in SMALL.items() if key != "head_dim"}
    for small in (SMALL, SMALL | {"num_key_value_heads": SMALL["num_attention_heads"]}, headless, SHALLOW):
        try:
            config = shrink_config(config_class(), small)
            model = build_small(lambda: model_class(config))  # noqa: B023
            return find_inputs(model, transformers_inputs(model.eval()))
        except Exception as error:
            problems.append(error)
    raise problems[0]


def shrink_config(config: Any, small: dict[str, int]) -> Any:
    """Make a configuration small, and the configurations in it."""
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict"):
            shrink_config(value, small)
    for name, size in small.items():
        if type(getattr(config, name, None)) is int and getattr(config, name) > size:
            setattr(config, name, size)
    if isinstance(getattr(config, "depths", None), list | tuple):
        config.depths = [1] * len(config.depths)
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        if isinstance(getattr(config, name, None), list) and hasattr(config, "num_hidden_layers"):
            with suppress(AttributeError):  # it is computed from other settings
                setattr(config, name, getattr(config, name)[: config.num_hidden_layers])
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "sep_token_id"):
        if isinstance(getattr(config, name, None), int) and getattr(config, name) >= SMALL["vocab_size"]:
            setattr(config, name, 1)
    return config


def transformers_inputs(model: Any) -> Iterator[Inputs]:
    """Yield inputs that a model of transformers may take."""
    accepted = inspect.signature(model.forward).parameters
    parts = [model.config, *(value for value in vars(model.config).values() if hasattr(value, "to_dict"))]

    def setting(default: int, *names: str) -> int:
        values = (getattr(part, name, None) for part in parts for name in names)
        return next((int(v if isinstance(v, int) else v[0]) for v in values if v), default)

    size, channels = setting(32, "image_size", "img_size"), setting(3, "num_channels", "in_channels")
    mel = setting(16, "num_mel_bins", "input_feat_per_channel", "feature_size")
    ids = torch.randint(3, max(setting(99, "vocab_size"), 4), (BATCH, 8))
    kinds: dict[str, list[Tensor]] = {
        "input_ids": [ids],
        "pixel_values": list(images(size, 64, 128, channels=channels)),
        "input_features": [torch.randn(BATCH, *shape) for shape in ((mel, 128), (128, mel), (mel, 3000))],
        "input_values": [torch.randn(BATCH, *shape) for shape in ((2000,), (1, 2000), (128, mel), (1024, mel))],
        "past_values": [torch.randn(BATCH, setting(32, "context_length", "prediction_length"), 1)],
        "query_embeds": [torch.randn(BATCH, 8, setting(32, "hidden_size"))],
        "inputs_embeds": [torch.randn(BATCH, 8, setting(32, "hidden_size"))],
    }
    for first in dict.fromkeys(name for name in (model.main_input_name, *kinds) if name in accepted and name in kinds):
        for value in kinds[first]:
            yield (), {first: value}
            if "decoder_input_ids" in accepted:
                yield (), {first: value, "decoder_input_ids": ids}
            if "bbox" in accepted:
                yield (), {first: value, "bbox": torch.zeros(BATCH, 8, 4, dtype=torch.long)}
            if "pixel_values" in accepted and first == "input_ids":
                yield from (((), {first: ids, "pixel_values": image}) for image in kinds["pixel_values"])


# timm, torchvision, segmentation-models: models of images

TIMM_MARKS = [
    "test_",
    "atto",
    "femto",
    "pico",
    "nano",
    "xxs",
    "xxtiny",
    "tiny",
    "_t_",
    "xs",
    "_s_",
    "small",
    "18",
    "b0",
]
ENCODERS = ["mobileone_s0", "mobilenet_v2", "efficientnet-b0", "mit_b0", "tu-mobilenetv3_small_100", "tu-convnext_atto"]


@cache
def list_timm() -> list[str]:
    """Return up to four models of each family, those with a name of small ones."""

    def find_mark(name: str) -> int:
        return next((i for i, mark in enumerate(TIMM_MARKS) if mark in name), len(TIMM_MARKS))

    timm = load("timm")
    families = (sorted(timm.list_models(module=family), key=find_mark)[:4] for family in timm.list_modules())
    return [name for family in families for name in family if find_mark(name) < len(TIMM_MARKS)]


def build_timm(name: str) -> Built:
    """Return a model of timm, for small images if it can be."""
    timm = load("timm")

    def make() -> nn.Module:
        try:
            model: nn.Module = timm.create_model(name, num_classes=10, img_size=64)
        except (TypeError, AssertionError, ValueError, RuntimeError):
            model = timm.create_model(name, num_classes=10)
        return model

    model: Any = build_small(make)
    return try_tensors(model, images(32, 64, 96, 128, model.default_cfg.get("input_size", (3, 224, 224))[-1]))


def list_torchvision() -> list[str]:
    """Return the models of torchvision that need none of its compiled operators."""
    return [name for name in load("torchvision.models").list_models() if "rcnn" not in name and "quantized" not in name]


def build_torchvision(name: str) -> Built:
    """Return a model of torchvision."""
    models = load("torchvision.models")
    builder = models.get_model_builder(name)
    settings = {"weights_backbone": None} if "weights_backbone" in inspect.signature(builder).parameters else {}
    model = build_small(lambda: models.get_model(name, weights=None, **settings))
    return try_tensors(
        model, [*images(32, 64, 96, 224, 299), *(torch.randn(BATCH, 3, 8, size, size) for size in (32, 64, 112))]
    )


def list_segmentation() -> list[str]:
    """Return the decoders of segmentation-models, each with some encoders."""
    kinds = [name for name, value in vars(load("segmentation_models_pytorch")).items() if is_module_class(value)]
    names = [(decoder, encoder) for decoder in sorted(kinds) for encoder in ENCODERS]
    return [f"{decoder}:{encoder}" for decoder, encoder in names if decoder != "DPT" or encoder.startswith("tu-")]


def build_segmentation(name: str) -> Built:
    """Return a model of segmentation-models."""
    decoder, _, encoder = name.partition(":")
    make = getattr(load("segmentation_models_pytorch"), decoder)
    return try_tensors(build_small(lambda: make(encoder, encoder_weights=None)), images(32, 64, 96, 256))


def is_module_class(value: Any) -> bool:
    """Return whether a value is a class of modules."""
    return isinstance(value, type) and issubclass(value, nn.Module)


# x-transformers: a small transformer with each of its switches


def list_x_transformers() -> list[str]:
    """Return the kinds of transformers, and the switches that are off by default."""
    library = load("x_transformers.x_transformers")
    switches = []
    for kind, prefix in ((library.AttentionLayers, ""), (library.Attention, "attn_")):
        switches += [prefix + p.name for p in inspect.signature(kind).parameters.values() if p.default is False]
    return ["Encoder", "Decoder", *(f"Decoder:{name}" for name in dict.fromkeys(switches))]


def build_x_transformers(name: str) -> Built:
    """Return a transformer with one switch."""
    library, (kind, _, switch) = load("x_transformers"), name.partition(":")
    layers = getattr(library, kind)(dim=32, depth=2, heads=4, attn_dim_head=8, **({switch: True} if switch else {}))
    model = library.TransformerWrapper(num_tokens=99, max_seq_len=64, attn_layers=layers)
    return try_tensors(model, [torch.randint(0, 99, (BATCH, 8))])


# vit-pytorch, torch_geometric, MONAI, diffusers: classes that are called by the names of their parameters

VIT = read_settings(
    "emb_dim=32 s1_emb_dim=8 s2_emb_dim=16 s3_emb_dim=32 image_size=64 frames=4 image_patch_size=8 frame_patch_size=2 "
    "spatial_depth=1 temporal_depth=1 cls_depth=1 num_memory_tokens_per_layer=2 seq_len=64 mlp_mult=2 num_slots=4 "
    "max_tokens_per_depth=(16,16) num_residual_streams=2 max_frames=8 ndim=2 input_shape=(64,64) window_size=4 "
    "dims=(32,32,32) channels=3 sm_dim=32 lg_dim=32 sm_patch_size=8 lg_patch_size=16"
)
GRAPHS = read_settings(
    "in_channels=8 out_channels=8 hidden_channels=8 num_layers=2 channels=8 edge_dim=4 dim=2 kernel_size=3 K=2 "
    "num_relations=3 num_nodes=12 num_timesteps=2 heads=2 depth=2 num_heads=2 num_steps=2 ratio=0.5 alpha=0.5 k=4 "
    "num_types=3 first_aggr=True embedding_dim=8 mode='cat' num_blocks=2 num_bilinear=4 num_spherical=3 num_radial=3 "
    "aggregators=('mean','max') scalers=('identity','amplification') in_dim=8 out_dim=8 emb_dim=8"
)
MONAI = read_settings(
    "spatial_dims=2 dimensions=2 in_channels=3 out_channels=4 channels=(8,16) strides=(2,2) img_size=(32,32) "
    "patch_size=8 num_classes=4 n_input_channels=3 in_shape=(3,32,32) classes=4 feature_size=12 latent_size=8 "
    "hidden_size=32 mlp_dim=64 num_layers=2 num_heads=4 num_channels=(8,8) num_res_blocks=1 num_res_channels=8 "
    "norm_num_groups=4 attention_levels=(False,False) latent_channels=3 num_embeddings=8 embedding_dim=8 "
    "block='basic' layers=(1,1,1,1) block_inplanes=(8,8,8,8) init_features=8 growth_rate=4 block_config=(2,2) "
    "num_channel_initial=8 extract_levels=(0,1) depth=1 hidden_channels=8 kernel_size=(3,3,3) image_size=32 "
    "downsample_parameters=((2,4,1,1),(2,4,1,1)) upsample_parameters=((2,4,1,1,0),(2,4,1,1,0)) init_filters=8 "
    "upsample_kernel_size=(2,2) num_tokens=99 max_seq_len=64 attn_layers_dim=32 attn_layers_depth=2 "
    "attn_layers_heads=4 filters=(8,16,32) conv_out_channels=8 model_name='efficientnet-b0' backbone='efficientnet-b0' "
    "encode_channels=(8,8) decode_channels=(8,8) out_shape=(4,) in_planes=8 planes=8 input_image_size=(32,32) "
    "label_nc=4 input_shape=(32,32) dim=8"
)
DIFFUSERS = SMALL | read_settings(
    "block_out_channels=(16,32) norm_num_groups=8 layers_per_block=1 cross_attention_dim=32 sample_size=16 "
    "num_layers=2 num_single_layers=1 attention_head_dim=8 num_attention_heads=4 joint_attention_dim=32 "
    "pooled_projection_dim=32 caption_channels=32 caption_projection_dim=32 text_embed_dim=32 inner_dim=32 "
    "num_refiner_layers=1 patch_size=2 axes_dims_rope=(2,2,4) in_channels=4 out_channels=4 latent_channels=4 "
    "encoder_block_out_channels=(16,32) decoder_block_out_channels=(16,32) base_dim=16 z_dim=4 dim_mult=(1,2) "
    "num_res_blocks=1 cap_feat_dim=32"
)


@cache
def find_vit() -> dict[str, Any]:
    """Return the classifiers that the modules of vit-pytorch define."""
    classes: dict[str, Any] = {}
    for info in pkgutil.iter_modules(load("vit_pytorch").__path__):
        try:
            module = load(f"vit_pytorch.{info.name}")
        except Exception:  # it needs something that is not installed
            continue
        for name, value in vars(module).items():
            is_own = is_module_class(value) and value.__module__ == module.__name__
            if is_own and "num_classes" in inspect.signature(value).parameters:
                classes[f"{info.name}.{name}"] = value
    return classes


def build_vit(name: str) -> Built:
    """Return a model of vit-pytorch."""
    kind = find_vit()[name]
    depth = {"depth": (1, 1, 1)} if "window_size" in inspect.signature(kind).parameters else {}
    model = build_small(lambda: kind(**fill(kind, SMALL | VIT | depth)))
    videos = [torch.randn(BATCH, *shape) for shape in ((3, 4, 64, 64), (4, 3, 64, 64), (3, 64))]
    return try_tensors(model, [*images(64), *videos, *images(256)])


@cache
def find_geometric() -> dict[str, Any]:
    """Return the convolutions, models and norms of graphs."""
    library = load("torch_geometric.nn")
    names = [*library.conv.classes, *library.models.classes, *library.norm.classes]
    classes = {name: getattr(library, name, None) for name in dict.fromkeys(names)}
    return {name: value for name, value in classes.items() if is_module_class(value)}


def build_geometric(name: str) -> Built:
    """Return a network of graphs."""
    kind, layers = find_geometric()[name], nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    library = load("torch_geometric.nn")
    parts = {"nn": layers, "conv": library.GCNConv(8, 8), "encoder": library.GCNConv(8, 8), "deg": torch.arange(1, 9)}
    model = kind(**fill(kind, GRAPHS | parts, required=True))
    x, edges, attributes = torch.randn(12, 8), torch.randint(0, 12, (2, 30)), torch.randn(30, 4)
    values: dict[str, Any] = {"x": x, "x_0": x, "h": x, "edge_index": edges, "hyperedge_index": edges}
    values |= {"pos": torch.randn(12, 3), "normal": torch.randn(12, 3), "batch": torch.zeros(12, dtype=torch.long)}
    values |= {"msg": x, "pos_edge_index": edges, "neg_edge_index": edges.flip(0), "type_vec": torch.arange(12) % 3}
    values |= {"edge_weight": torch.rand(30), "pseudo": torch.rand(30, 2), "edge_type": torch.randint(0, 3, (30,))}
    needed = fill(model.forward, values | {"edge_attr": attributes, "z": torch.randint(1, 9, (12,))}, required=True)
    return find_inputs(model, [((), needed), ((), needed | fill(model.forward, {"edge_attr": attributes}))])


@cache
def find_monai() -> dict[str, Any]:
    """Return the networks of MONAI, each under one name."""
    classes = {value: name for name, value in vars(load("monai.networks.nets")).items() if is_module_class(value)}
    return {name: value for value, name in classes.items()}


def build_monai(name: str) -> Built:
    """Return a network of MONAI."""
    kind = find_monai()[name]

    def make() -> nn.Module:
        try:
            model: nn.Module = kind(**fill(kind, MONAI, required=True))
        except Exception:
            model = kind(**fill(kind, MONAI))
        return model

    shapes = [(3, 32, 32), (3, 64, 64), (3, 96, 96), (1, 32, 32), (3, 32, 32, 32), (1, 32, 32, 32), (8,), (3, 128, 128)]
    candidates: list[Inputs] = [((torch.randn(BATCH, *shape),), {}) for shape in shapes]
    candidates.append(((torch.randn(BATCH, 3, 32, 32), torch.randint(0, 9, (BATCH,))), {}))
    candidates.append(((torch.randint(0, 99, (BATCH, 8)),), {}))
    return find_inputs(build_small(make), candidates)


@cache
def find_diffusers() -> dict[str, Any]:
    """Return the models of diffusers."""
    library = load("diffusers")
    classes: dict[str, Any] = {}
    for name in dir(library):
        try:
            value = getattr(library, name)
        except Exception:  # it needs something that is not installed
            continue
        if is_module_class(value) and issubclass(value, library.ModelMixin) and value is not library.ModelMixin:
            classes[name] = value
    return classes


def build_diffusers(name: str) -> Built:
    """Return a model of diffusers."""
    kind, settings = find_diffusers()[name], dict(DIFFUSERS)
    for key, parameter in inspect.signature(kind).parameters.items():
        if key.endswith("block_types") and isinstance(parameter.default, tuple | list):
            settings[key] = (parameter.default[0], parameter.default[-1])
    try:
        model: Any = build_small(lambda: kind(**fill(kind, settings)))
    except ValueError:  # some take the size of heads alone
        del settings["num_attention_heads"]
        model = build_small(lambda: kind(**fill(kind, settings)))
    step = torch.full((BATCH,), 3)
    common: dict[str, Any] = {"timestep": step, "timesteps": step, "encoder_hidden_states": torch.randn(BATCH, 8, 32)}
    common |= {"pooled_projections": torch.randn(BATCH, 32), "encoder_attention_mask": torch.ones(BATCH, 8)}
    common |= {"class_labels": torch.zeros(BATCH, dtype=torch.long), "controlnet_cond": next(images(128))}
    common["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None}
    spaces = ((16, 16), (32, 32), (5, 16, 16), (16,))
    tensors = [torch.randn(BATCH, channels, *space) for channels in (4, 3, 16) for space in spaces]
    first = next(iter(inspect.signature(model.forward).parameters))
    candidates: list[Inputs] = []
    for tensor in [*tensors, torch.randn(BATCH, 8, 32)]:
        candidates += [((), {first: tensor} | fill(model.forward, common, required)) for required in (True, False)]
    return find_inputs(model, candidates)


# peft: a small Llama with adapters, which alone are trained

ADAPTERS = ["Lora", "AdaLora", "LoHa", "LoKr", "IA3", "OFT", "BOFT", "Vera"]


def build_peft(name: str) -> Built:
    """Return a small Llama with adapters of one kind."""
    (model, inputs), library = build_transformers("LlamaForCausalLM"), load("peft")
    settings = {"target_modules": ["q_proj", "v_proj"], "feedforward_modules": [], "r": 4, "total_step": 10}
    settings |= {"oft_block_size": 4, "boft_block_size": 4} | ({"r": 0} if name == "OFT" else {})
    kind = getattr(library, f"{name}Config")
    return find_inputs(library.get_peft_model(model, kind(**fill(kind, settings))), [inputs])


# Each package: the module to import, the names of its architectures, and how one is built.
PACKAGES: dict[str, tuple[str, Callable[[], Iterable[str]], Callable[[str], Built]]] = {
    "x-transformers": ("x_transformers", list_x_transformers, build_x_transformers),
    "vit-pytorch": ("vit_pytorch", find_vit, build_vit),
    "torch_geometric": ("torch_geometric", find_geometric, build_geometric),
    "monai": ("monai", find_monai, build_monai),
    "segmentation": ("segmentation_models_pytorch", list_segmentation, build_segmentation),
    "diffusers": ("diffusers", find_diffusers, build_diffusers),
    "torchvision": ("torchvision", list_torchvision, build_torchvision),
    "timm": ("timm", list_timm, build_timm),
    "peft": ("peft", lambda: ADAPTERS, build_peft),
    "transformers": ("transformers", list_transformers, build_transformers),
}


def list_architectures(package: str) -> list[str]:
    """Return the names of a package's architectures; none if it is not installed."""
    module, list_names, _ = PACKAGES[package]
    return list(list_names()) if importlib.util.find_spec(module) is not None else []


def build(package: str, name: str) -> Built:
    """Return an architecture in evaluation mode, and inputs for it."""
    return PACKAGES[package][2](name)


def declare_operators() -> None:
    """Declare torchvision's compiled operators if they cannot be loaded, as with a torch of another kind.

    Its Python code needs their names when it is imported, and classifiers need no more than that.
    """
    try:
        load("torchvision")
    except ModuleNotFoundError:
        return
    except (ImportError, OSError, RuntimeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for operator in ("nms", "qnms"):
            torch.library.define(f"torchvision::{operator}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")


declare_operators()
