//! The operations composed of candle's own, for devices for which this crate has no kernels.

use candle_core::{D, DType, Result, Tensor};

/// Computes the softmax of each row.
pub(crate) fn softmax_last_dim(x: &Tensor) -> Result<Tensor> {
    // The maximum is taken off so that no exponential overflows. It changes no result, so it needs
    // no gradient.
    let exp = x
        .broadcast_sub(&x.detach().max_keepdim(D::Minus1)?)?
        .exp()?;
    exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)
}

/// Normalises each row to mean 0 and variance 1, then applies weight and bias.
pub(crate) fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    let dtype = x.dtype();
    let x = x.to_dtype(computed_in(dtype))?;
    let centered = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    normalized(&centered, eps)?
        .to_dtype(dtype)?
        .broadcast_mul(weight)?
        .broadcast_add(bias)
}

/// Normalises each row to a mean square of 1, then applies the weight.
pub(crate) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let dtype = x.dtype();
    normalized(&x.to_dtype(computed_in(dtype))?, eps)?
        .to_dtype(dtype)?
        .broadcast_mul(weight)
}

/// Divides each row by the square root of the mean of its squares, plus `eps` under the root.
fn normalized(x: &Tensor, eps: f64) -> Result<Tensor> {
    let squares = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(squares + eps)?.sqrt()?)
}

/// Rotates pairs of an element in the first half of a row and one in the second.
pub(crate) fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let half = x.dim(D::Minus1)? / 2;
    let (a, b) = (
        x.narrow(D::Minus1, 0, half)?,
        x.narrow(D::Minus1, half, half)?,
    );
    let (a, b) = turned(&a, &b, cos, sin)?;
    Tensor::cat(&[a, b], D::Minus1)
}

/// Rotates neighbouring elements as pairs.
pub(crate) fn rope_i(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let (batch, heads, time, width) = x.dims4()?;
    let pairs = x.reshape((batch, heads, time, width / 2, 2))?;
    let (a, b) = (
        pairs.narrow(4, 0, 1)?.squeeze(4)?,
        pairs.narrow(4, 1, 1)?.squeeze(4)?,
    );
    let (a, b) = turned(&a, &b, cos, sin)?;
    Tensor::stack(&[a, b], 4)?.reshape((batch, heads, time, width))
}

/// Rotates the pairs of `a` and `b` by the angles of their positions, and returns the new `a` and
/// `b`.
fn turned(a: &Tensor, b: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<(Tensor, Tensor)> {
    // [time, half] goes with all batches and heads, [batch, time, half] with all heads.
    let spread = |angles: &Tensor| {
        if angles.rank() == 3 {
            angles.unsqueeze(1)
        } else {
            Ok(angles.clone())
        }
    };
    let (cos, sin) = (spread(cos)?, spread(sin)?);
    let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    Ok((first, (a.broadcast_mul(&sin)? + b.broadcast_mul(&cos)?)?))
}

/// Computes attention of queries, keys and values `[batch, heads, time, width]`.
pub(crate) fn attention(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    causal: bool,
    scale: f64,
) -> Result<Tensor> {
    let mut scores = (query.contiguous()? * scale)?.matmul(&key.transpose(2, 3)?)?;
    if causal {
        let (rows, columns) = (query.dim(2)?, key.dim(2)?);
        let hidden = |row: usize| {
            (0..columns).map(move |column| {
                if column <= row {
                    0f32
                } else {
                    f32::NEG_INFINITY
                }
            })
        };
        let mask: Vec<f32> = (0..rows).flat_map(hidden).collect();
        let mask =
            Tensor::from_vec(mask, (rows, columns), query.device())?.to_dtype(query.dtype())?;
        scores = scores.broadcast_add(&mask)?;
    }
    softmax_last_dim(&scores)?.matmul(&value.contiguous()?)
}

/// Returns the mean, over rows of scores, of the negative log-probability of each row's target.
pub(crate) fn cross_entropy(scores: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let shifted = scores.broadcast_sub(&scores.detach().max_keepdim(1)?)?;
    let log_sum = shifted.exp()?.sum_keepdim(1)?.log()?;
    (log_sum - shifted.gather(&targets.unsqueeze(1)?, 1)?)?.mean_all()
}

/// Returns the dtype in which a norm of this dtype is computed.
fn computed_in(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        dtype => dtype,
    }
}
