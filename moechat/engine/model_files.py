"""A model as its files give it: a folder in Hugging Face layout, or GGUF."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from moechat.engine.vendor_defaults import ignored_settings, vendor_defaults
from moechat.errors import BadParameter, MoechatError, TextUnavailable
from moechat.json_file import read_json_object
from moechat.models.architectures import architecture_of, bind_tensors, load_config, load_spec
from moechat.models.spec import BoundTensor, ModelSpec
from moechat.weights.mapped import INDEX_NAME, Checkpoint, drop_pages

if TYPE_CHECKING:
    from moechat.engine.text import TextModel
    from moechat.weights.gguf_file import GGUFCheckpoint


_INDEX_LIMIT_BYTES = 256_000_000


class ModelFiles(Protocol):
    """What the engine and `moechat show` ask of a model's files."""

    path: Path

    @property
    def spec(self) -> ModelSpec:
        """Dimensions and variation points."""

    @property
    def architecture(self) -> str:
        """The architecture as the files call it."""

    @property
    def weight_files(self) -> list[Path]:
        """Files that hold tensors."""

    def bind(self, speculate: bool = False) -> list[BoundTensor]:
        """Map the weights and find every tensor of the model, of its draft layer too if asked."""

    def text(self) -> TextModel:
        """Tokenizer and chat template. Raises TextUnavailable when there is none."""

    def has_chat_template(self) -> bool:
        """Whether the files hold a template of their own."""

    def notice(self) -> str:
        """What a user should know before the first answer; "" for nothing."""

    def vendor_defaults(self) -> dict[str, Any]:
        """Sampling parameters that the vendor set, or that are usual for such files."""

    def drop_pages(self) -> None:
        """Let go of this process's pages of the weights; they come back when they are read."""

    def close(self) -> None:
        """Let go of the mappings; each is unmapped when the last array on it is gone."""


def find_model_files(path: Path) -> ModelFiles:
    """The model at ``path``: a GGUF file, a folder with one GGUF model, or a Hugging Face folder.

    Nothing is read but names. Raises ModelNotFound for a folder with several GGUF models,
    CheckpointDamaged when parts of a split one are missing.
    """
    from moechat.weights.gguf_find import find_gguf

    parts = find_gguf(path)
    return FolderFiles(path) if parts is None else GGUFFiles(path, parts)


class FolderFiles:
    """config.json, safetensors, tokenizer files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._checkpoint: Checkpoint | None = None

    @cached_property
    def spec(self) -> ModelSpec:
        """Raises as load_spec does."""
        return load_spec(self.path)

    @property
    def architecture(self) -> str:
        """The one of config.json's architectures that is computed."""
        return architecture_of(load_config(self.path), str(self.path / "config.json"))

    @property
    def weight_files(self) -> list[Path]:
        """Those of bind(), as far as they are here: other copies may lie beside them."""
        index = self.path / INDEX_NAME
        if index.is_file():
            owners = read_json_object(index, _INDEX_LIMIT_BYTES).get("weight_map")
            names = {str(name) for name in owners.values()} if isinstance(owners, dict) else ()
            files = [self.path / name for name in sorted(names) if Path(name).name == name]
            return [file for file in files if file.is_file()]
        single = self.path / "model.safetensors"
        return [single] if single.is_file() else sorted(self.path.glob("*.safetensors"))

    def bind(self, speculate: bool = False) -> list[BoundTensor]:
        """Raises ModelNotFound, CheckpointDamaged, ArchitectureUnsupported, BadParameter."""
        spec = self.spec
        self._checkpoint = Checkpoint.open(self.path)
        return bind_tensors(spec, self._checkpoint, load_config(self.path), draft=speculate)

    def text(self) -> TextModel:
        """From tokenizer.json, tokenizer_config.json and the template's file."""
        # Imported here: a model without text functions needs neither tokenizers nor jinja2.
        from moechat.engine.text import TextModel

        return TextModel.open(self.path)

    def has_chat_template(self) -> bool:
        """Whether a file holds one."""
        from moechat.text.template_source import read_config, read_template

        try:
            read_template(self.path, read_config(self.path))
        except TextUnavailable:
            return False
        return True

    def notice(self) -> str:
        """Settings of the vendor that are not followed."""
        ignored = ignored_settings(self.path)
        if not ignored:
            return ""
        return f"generation_config.json sets what moechat does not follow: {', '.join(ignored)}"

    def vendor_defaults(self) -> dict[str, Any]:
        """From generation_config.json."""
        return vendor_defaults(self.path)

    def drop_pages(self) -> None:
        """Of all files that bind() mapped."""
        if self._checkpoint is not None:
            drop_pages(tensor.file_content for tensor in self._checkpoint.tensors.values())

    def close(self) -> None:
        """Unmap the weights."""
        if self._checkpoint is not None:
            self._checkpoint.close()


# Without them small models, which most GGUF files hold, wander off at once.
_USUAL_SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


class GGUFFiles:
    """One GGUF file, or the parts of a split one: metadata, tokenizer and tensors together."""

    def __init__(self, path: Path, parts: list[Path]) -> None:
        self.path = path
        self.weight_files = parts

    @cached_property
    def _checkpoint(self) -> GGUFCheckpoint:
        from moechat.weights.gguf_file import GGUFCheckpoint

        return GGUFCheckpoint.open(self.weight_files)

    @cached_property
    def spec(self) -> ModelSpec:
        """From the metadata. Raises ArchitectureUnsupported, CheckpointDamaged."""
        from moechat.models.gguf.config import read_spec

        return read_spec(self._checkpoint)

    @property
    def architecture(self) -> str:
        """general.architecture."""
        from moechat.models.gguf.config import architecture_of

        return architecture_of(self._checkpoint)

    def bind(self, speculate: bool = False) -> list[BoundTensor]:
        """Raises CheckpointDamaged, ArchitectureUnsupported, BadParameter."""
        from moechat.models.gguf.bind import bind_tensors

        if speculate:
            raise BadParameter(
                "speculation is not possible with this model",
                "moechat does not use the multi-token-prediction layer of GGUF files",
                "Leave out --speculate",
            )

        return bind_tensors(self.spec, self._checkpoint)

    def text(self) -> TextModel:
        """From the metadata."""
        return self._text

    @cached_property
    def _text(self) -> TextModel:
        from moechat.engine.text import TextModel
        from moechat.folders import cache_folder
        from moechat.text.gguf_tokenizer import build_tokenizer, tokenizer_config
        from moechat.text.usual_template import usual_template

        metadata, origin = self._checkpoint.metadata, self.weight_files[0]
        library = build_tokenizer(metadata, origin, cache_folder())
        config = tokenizer_config(metadata, origin)
        if not self.has_chat_template():
            usual = usual_template(metadata)
            config["chat_template"] = usual[1] if usual else None
        return TextModel.from_parts(library, config, origin=str(origin))

    def has_chat_template(self) -> bool:
        """Whether the metadata hold one."""
        from moechat.text.gguf_tokenizer import chat_template

        return chat_template(self._checkpoint.metadata, self.weight_files[0]) is not None

    def notice(self) -> str:
        """Whose template stands in for a missing one."""
        from moechat.text.usual_template import usual_template

        usual = None if self.has_chat_template() else usual_template(self._checkpoint.metadata)
        if usual is None:
            return ""
        try:
            self.text()
        except MoechatError:  # whoever asks for text will meet it
            return ""
        return (
            f"{self.path.name} has no chat template: {usual[0]}'s is used. It may be a base model."
        )

    def vendor_defaults(self) -> dict[str, Any]:
        """The format has no settled keys for them: what local programs commonly take."""
        return dict(_USUAL_SAMPLING)

    def drop_pages(self) -> None:
        """Of all parts."""
        drop_pages(tensor.file_content for tensor in self._checkpoint.tensors.values())

    def close(self) -> None:
        """Unmap the file."""
        self._checkpoint.close()
