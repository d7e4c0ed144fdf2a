from marsjax.models.config import Llama3Scaling, ModelConfig, UnsupportedModel
from marsjax.models.decoder import Decoder
from marsjax.models.layout import abstract, to_list, to_stacked

__all__ = ["Decoder", "Llama3Scaling", "ModelConfig", "UnsupportedModel", "abstract", "to_list", "to_stacked"]
