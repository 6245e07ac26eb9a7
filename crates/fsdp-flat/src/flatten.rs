//! Flattens many tensors into one flat tensor and back, with FlatParameter's padding, and cuts out
//! a rank's shard.

use candle_core::Tensor;
use fsdp_layout::FlatLayout;
use fsdp_layout::flat::{ALIGNMENT_PADDING_VALUE, FlatEntry};
use fsdp_layout::shard::chunk_range;

use crate::dtype::{file_dtype, with_float};
use crate::error::FlatError;
use crate::storage::{HostSlice, HostSliceMut, zeros};

/// Concatenates tensors in the order and with the padding of `layout`: torch's `flatten_tensors`.
///
/// The result is one-dimensional and has exactly `layout.unpadded_unsharded_numel()` elements;
/// padding is filled with 42, as torch does. Tensors that are not contiguous are flattened in
/// row-major order.
///
/// # Errors
/// The tensors must be as many as the layout has parameters, with their shapes, and of one
/// floating-point dtype.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fsdp_flat::{flatten_tensors, unflatten_tensors};
/// use fsdp_layout::FlatLayout;
/// // Each tensor starts at a multiple of four elements: 3, one of padding, 2; two ranks share that evenly.
/// let layout = FlatLayout::new(vec![("a".into(), vec![3]), ("b".into(), vec![2, 1])], 4, 2)?;
/// let tensors = [Tensor::new(&[1f32, 2., 3.], &Device::Cpu)?, Tensor::new(&[[4f32], [5.]], &Device::Cpu)?];
/// let flat = flatten_tensors(&layout, &tensors)?;
/// assert_eq!(flat.to_vec1::<f32>()?, [1., 2., 3., 42., 4., 5.]);
/// assert_eq!(unflatten_tensors(&layout, &flat)?[1].to_vec2::<f32>()?, [[4.], [5.]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn flatten_tensors(layout: &FlatLayout, tensors: &[Tensor]) -> Result<Tensor, FlatError> {
    let first_tensor = tensors.first().ok_or(fsdp_layout::FlatLayoutError::Empty)?;
    if tensors.len() != layout.fqns().len() {
        let expected = layout.fqns().len();
        return Err(FlatError::shape(
            "tensors to flatten",
            &[expected],
            &[tensors.len()],
        ));
    }
    let mut pieces = Vec::with_capacity(layout.entries().len());
    for (entry, &numel) in layout.entries().iter().zip(layout.numels_with_padding()) {
        pieces.push(match *entry {
            FlatEntry::Param(param) => {
                check_param(layout, param, &tensors[param], first_tensor)?;
                tensors[param].flatten_all()?
            }
            // The value makes padding that gets into a state dict easy to notice.
            FlatEntry::Padding => Tensor::full(
                f32::from(ALIGNMENT_PADDING_VALUE),
                numel,
                first_tensor.device(),
            )?
            .to_dtype(first_tensor.dtype())?,
        });
    }
    Ok(Tensor::cat(&pieces, 0)?)
}

/// Checks that a tensor has the shape that the layout has for parameter `param`, and the
/// floating-point dtype of `first_tensor`.
fn check_param(
    layout: &FlatLayout,
    param: usize,
    tensor: &Tensor,
    first_tensor: &Tensor,
) -> Result<(), FlatError> {
    let fqn = &layout.fqns()[param];
    if tensor.dims() != layout.shapes()[param] {
        return Err(FlatError::shape(
            fqn,
            &layout.shapes()[param],
            tensor.dims(),
        ));
    }
    let found = file_dtype(tensor.dtype())?;
    if !found.is_float() {
        return Err(FlatError::IntegerDType {
            fqn: fqn.clone(),
            dtype: found,
        });
    }
    let expected = file_dtype(first_tensor.dtype())?;
    if found != expected {
        return Err(FlatError::MixedDType {
            fqn: fqn.clone(),
            expected,
            found,
        });
    }
    Ok(())
}

/// Returns the parameters of an unsharded flat tensor, in the layout's order and in their own
/// shapes, without padding. They are copies. (torch's `_get_unflat_views` returns views, which
/// become invalid when the buffer is freed.)
///
/// # Errors
/// `flat` must have `layout.unpadded_unsharded_numel()` elements.
pub fn unflatten_tensors(layout: &FlatLayout, flat: &Tensor) -> Result<Vec<Tensor>, FlatError> {
    if flat.dims() != [layout.unpadded_unsharded_numel()] {
        let expected = layout.unpadded_unsharded_numel();
        return Err(FlatError::shape("flat tensor", &[expected], flat.dims()));
    }
    (0..layout.fqns().len())
        .map(|param| {
            let range = layout.param_range(param);
            // candle's `copy` would copy all of the storage that the piece is a view of.
            let piece = flat
                .narrow(0, range.start, range.len())?
                .force_contiguous()?;
            Ok(piece.reshape(layout.shapes()[param].as_slice())?.detach())
        })
        .collect()
}

/// Returns a rank's piece of a tensor flattened row-major, and the padding, in elements, that makes
/// all ranks' pieces as long as the first: torch's `_get_unpadded_shard`. Pieces have `ceil(numel /
/// world_size)` elements, the last ones fewer or none. The piece is a view of a contiguous tensor,
/// and of a copy of any other.
///
/// # Errors
/// candle's errors, for a tensor that cannot be flattened.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let tensor = Tensor::arange(0f32, 5f32, &Device::Cpu)?;
/// let (piece, padding) = fsdp_flat::get_unpadded_shard(&tensor, 2, 4)?;
/// assert_eq!((piece.to_vec1::<f32>()?, padding), (vec![4.], 1)); // of 2, 2, 1, 0
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn get_unpadded_shard(
    tensor: &Tensor,
    rank: usize,
    world_size: usize,
) -> Result<(Tensor, usize), FlatError> {
    let numel = tensor.elem_count();
    let range = chunk_range(numel, world_size, rank);
    // The first rank's piece is the longest.
    let padding = chunk_range(numel, world_size, 0).len() - range.len();
    // candle cannot narrow to nothing at the very end of a tensor.
    let piece = if range.is_empty() {
        Tensor::zeros(0, tensor.dtype(), tensor.device())?
    } else {
        tensor.flatten_all()?.narrow(0, range.start, range.len())?
    };
    Ok((piece, padding))
}

/// Returns a rank's piece of a tensor flattened row-major, copied and padded with zeros to the same
/// length on every rank: torch's `_get_shard`. The shard is on the CPU; the padding's length, in
/// elements, is returned too.
///
/// # Errors
/// The same as [`get_unpadded_shard`]; only floating-point tensors.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let tensor = Tensor::arange(0f32, 5f32, &Device::Cpu)?;
/// let (shard, padding) = fsdp_flat::get_shard(&tensor, 2, 4)?;
/// assert_eq!((shard.to_vec1::<f32>()?, padding), (vec![4., 0.], 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn get_shard(
    tensor: &Tensor,
    rank: usize,
    world_size: usize,
) -> Result<(Tensor, usize), FlatError> {
    let (piece, padding) = get_unpadded_shard(tensor, rank, world_size)?;
    let numel = piece.elem_count();
    // The padding of an unsharded tensor is 42, but that on the right of a shard is 0, as in torch.
    let shard = zeros(&[numel + padding], tensor.dtype())?;
    with_float!(tensor.dtype(), T => {
        let piece_elements = HostSlice::<T>::read(&piece)?;
        let mut shard_elements = HostSliceMut::<T>::write(&shard)?;
        shard_elements[..numel].copy_from_slice(&piece_elements);
        shard_elements.finish()?;
    }, else return Err(FlatError::IntegerDType { fqn: "flat tensor".into(), dtype: file_dtype(tensor.dtype())? }));
    Ok((shard, padding))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};
    use fsdp_layout::flat::aligned_numel;

    fn arange(from: usize, shape: &[usize]) -> Tensor {
        let numel: usize = shape.iter().product();
        Tensor::arange(from as f32, (from + numel) as f32, &Device::Cpu)
            .unwrap()
            .reshape(shape)
            .unwrap()
    }

    fn layout(shapes: &[&[usize]], align: usize, world_size: usize) -> FlatLayout {
        let params = shapes
            .iter()
            .enumerate()
            .map(|(i, shape)| (format!("p{i}"), shape.to_vec()))
            .collect();
        FlatLayout::new(params, align, world_size).unwrap()
    }

    #[test]
    fn flattening_pads_with_42_and_unflattening_drops_it() {
        let layout = layout(&[&[3], &[2, 2]], aligned_numel(fsdp_layout::DType::F32), 3);
        let tensors = [arange(0, &[3]), arange(3, &[2, 2]).t().unwrap()];
        let flat = flatten_tensors(&layout, &tensors).unwrap();
        assert_eq!(
            flat.to_vec1::<f32>().unwrap(),
            [0., 1., 2., 42., 3., 5., 4., 6., 42.]
        );
        let back = unflatten_tensors(&layout, &flat).unwrap();
        assert_eq!(back[1].to_vec2::<f32>().unwrap(), [[3., 5.], [4., 6.]]);
    }

    #[test]
    fn shards_concatenate_to_the_tensor_and_are_padded_with_zeros() {
        for (numel, world_size) in [(10, 4), (5, 4), (2, 4), (1, 3), (9, 4), (12, 5), (0, 2)] {
            let tensor = arange(1, &[numel]);
            let mut all = Vec::new();
            for rank in 0..world_size {
                let (piece, padding) = get_unpadded_shard(&tensor, rank, world_size).unwrap();
                let (shard, same) = get_shard(&tensor, rank, world_size).unwrap();
                assert_eq!(padding, same);
                let piece = piece.to_vec1::<f32>().unwrap();
                let shard = shard.to_vec1::<f32>().unwrap();
                assert_eq!(shard.len(), numel.div_ceil(world_size));
                assert_eq!(shard[..piece.len()], piece);
                assert!(shard[piece.len()..].iter().all(|&x| x == 0.0));
                all.extend(piece);
            }
            assert_eq!(all, tensor.to_vec1::<f32>().unwrap());
        }
    }

    #[test]
    fn what_cannot_be_flattened_is_refused() {
        let two = layout(&[&[3], &[3]], 0, 1);
        let ints = [
            arange(0, &[3]).to_dtype(DType::I64).unwrap(),
            arange(0, &[3]).to_dtype(DType::I64).unwrap(),
        ];
        assert!(
            matches!(flatten_tensors(&two, &ints), Err(FlatError::IntegerDType { fqn, .. }) if fqn == "p0")
        );
        let mixed = [
            arange(0, &[3]),
            arange(0, &[3]).to_dtype(DType::F64).unwrap(),
        ];
        assert!(
            matches!(flatten_tensors(&two, &mixed), Err(FlatError::MixedDType { fqn, .. }) if fqn == "p1")
        );
        let wrong = [arange(0, &[3]), arange(0, &[4])];
        assert!(matches!(
            flatten_tensors(&two, &wrong),
            Err(FlatError::ShapeMismatch { .. })
        ));
        assert!(flatten_tensors(&two, &wrong[..1]).is_err());
        assert!(flatten_tensors(&two, &[]).is_err());
    }
}
