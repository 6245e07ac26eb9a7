//! A block of the model, and the layers that it is made of.

use candle_core::{Result, Tensor};
use candle_nn::kv_cache::KvCache;
use candle_nn::{Init, VarBuilder};
use fsdp::ops::{
    layer_norm, linear, linear_add, linear_gelu_erf, packed_attention, scaled_dot_product_attention,
};

use super::config::GptConfig;

/// The initial values of matrices and embeddings.
pub(super) const NORMAL: Init = Init::Randn {
    mean: 0.0,
    stdev: 0.02,
};

const LAYER_NORM_EPS: f64 = 1e-5;

/// A block: attention and MLP, each on a normalised input and added to the residual stream.
pub(super) struct Block {
    ln_1: LayerNorm,
    attn: Attention,
    ln_2: LayerNorm,
    mlp: Mlp,
}

impl Block {
    /// Declares the parameters of a block, in nanoGPT's order.
    pub(super) fn new(vb: &VarBuilder<'_>, config: &GptConfig) -> Result<Self> {
        Ok(Block {
            ln_1: LayerNorm::new(&vb.pp("ln_1"), config.hidden)?,
            attn: Attention::new(&vb.pp("attn"), config)?,
            ln_2: LayerNorm::new(&vb.pp("ln_2"), config.hidden)?,
            mlp: Mlp::new(&vb.pp("mlp"), config.hidden)?,
        })
    }

    /// Computes `[batch, time, hidden]` from the same. With a cache, the positions go on after
    /// those that it holds.
    pub(super) fn forward(&self, x: &Tensor, cache: Option<&mut KvCache>) -> Result<Tensor> {
        let x = self.attn.forward(&self.ln_1.forward(x)?, x, cache)?;
        self.mlp.forward(&self.ln_2.forward(&x)?, &x)
    }
}

struct Attention {
    heads: usize,
    c_attn: Linear,
    c_proj: Linear,
}

impl Attention {
    /// Declares the parameters of the attention.
    fn new(vb: &VarBuilder<'_>, config: &GptConfig) -> Result<Self> {
        let hidden = config.hidden;
        Ok(Attention {
            heads: config.heads,
            c_attn: Linear::new(&vb.pp("c_attn"), hidden, 3 * hidden)?,
            c_proj: Linear::new(&vb.pp("c_proj"), hidden, hidden)?,
        })
    }

    /// Mixes the positions of `x`, and adds the residual. With a cache, `x` holds only new
    /// positions, and the cache those before.
    fn forward(
        &self,
        x: &Tensor,
        residual: &Tensor,
        cache: Option<&mut KvCache>,
    ) -> Result<Tensor> {
        // Queries, keys and values are one product: their weights are one matrix.
        let qkv = self.c_attn.forward(x)?;
        let mixed = match cache {
            None => packed_attention(&qkv, self.heads, true)?,
            Some(cache) => self.attention_with_cache(&qkv, cache)?,
        };
        self.c_proj.forward_and_add(&mixed, residual)
    }

    /// Computes the attention of new positions over those in the cache and themselves, and appends
    /// their keys and values to the cache. Several positions at once are allowed only if the cache
    /// is empty, because of the causal mask.
    fn attention_with_cache(&self, qkv: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        // Split `[batch, time, 3 * heads * width]` into queries, keys and values of `[batch, heads,
        // time, width]`.
        let (batch, time, packed) = qkv.dims3()?;
        let width = packed / 3 / self.heads;
        let split = qkv
            .reshape((batch, time, 3, self.heads, width))?
            .permute((2, 0, 3, 1, 4))?
            .contiguous()?;
        let (key, value) = cache.append(&split.get(1)?, &split.get(2)?)?;
        let scale = (width as f64).powf(-0.5);
        let is_causal = time > 1;
        let mixed = scaled_dot_product_attention(&split.get(0)?, &key, &value, is_causal, scale)?;
        mixed.transpose(1, 2)?.reshape((batch, time, packed / 3))
    }
}

struct Mlp {
    c_fc: Linear,
    c_proj: Linear,
}

impl Mlp {
    /// Declares the parameters of the MLP.
    fn new(vb: &VarBuilder<'_>, hidden: usize) -> Result<Self> {
        Ok(Mlp {
            c_fc: Linear::new(&vb.pp("c_fc"), hidden, 4 * hidden)?,
            c_proj: Linear::new(&vb.pp("c_proj"), 4 * hidden, hidden)?,
        })
    }

    /// Computes the MLP of `x`, and adds the residual.
    fn forward(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        let hidden = linear_gelu_erf(x, &self.c_fc.weight, &self.c_fc.bias)?;
        self.c_proj.forward_and_add(&hidden, residual)
    }
}

struct Linear {
    weight: Tensor,
    bias: Tensor,
}

impl Linear {
    /// Declares a weight and a bias, with torch's initial values.
    fn new(vb: &VarBuilder<'_>, input: usize, output: usize) -> Result<Self> {
        // torch's initial values of a bias depend on the inputs of its layer.
        let bound = (input as f64).powf(-0.5);
        let weight = vb.get_with_hints((output, input), "weight", NORMAL)?;
        let bias = vb.get_with_hints(
            output,
            "bias",
            Init::Uniform {
                lo: -bound,
                up: bound,
            },
        )?;
        Ok(Linear { weight, bias })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        linear(x, &self.weight, Some(&self.bias))
    }

    fn forward_and_add(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        linear_add(x, &self.weight, Some(&self.bias), residual)
    }
}

/// A layer norm with a weight and a bias.
pub(super) struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
}

impl LayerNorm {
    pub(super) fn new(vb: &VarBuilder<'_>, hidden: usize) -> Result<Self> {
        let weight = vb.get_with_hints(hidden, "weight", Init::Const(1.0))?;
        let bias = vb.get_with_hints(hidden, "bias", Init::Const(0.0))?;
        Ok(LayerNorm { weight, bias })
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        layer_norm(x, &self.weight, &self.bias, LAYER_NORM_EPS)
    }
}
