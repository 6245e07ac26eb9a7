//! This rank's shard of the parameters of one FSDP unit.

use candle_core::Tensor;
use fsdp_layout::FlatLayout;

use crate::error::FlatError;
use crate::sharded::ShardedTensor;

/// One rank's shard of a FlatParameter, and the place of each parameter in it. In torch, this is
/// split between `FlatParameter` and `FlatParamHandle`.
///
/// The shard is one flat tensor of `layout.sharded_numel()` elements. Collectives send it, and
/// optimizers change it in place. Parameters and anything shaped like them (gradients, optimizer
/// state) are lists of boxes, each a view of a flat tensor.
#[derive(Debug, Clone)]
pub struct FlatParameter {
    layout: FlatLayout,
    rank: usize,
    shard: Tensor,
}

impl FlatParameter {
    /// Makes the shard of rank `rank` of the `layout.world_size()` ranks that share the
    /// FlatParameter.
    ///
    /// # Errors
    /// There must be such a rank, and `shard` must be one-dimensional with
    /// `layout.sharded_numel()` elements.
    pub fn new(layout: FlatLayout, rank: usize, shard: Tensor) -> Result<Self, FlatError> {
        let world_size = layout.world_size();
        if rank >= world_size {
            return Err(FlatError::NoSuchRank { rank, world_size });
        }
        if shard.dims() != [layout.sharded_numel()] {
            let expected = layout.sharded_numel();
            return Err(FlatError::shape(
                "shard of a FlatParameter",
                &[expected],
                shard.dims(),
            ));
        }
        Ok(FlatParameter {
            layout,
            rank,
            shard,
        })
    }

    /// Returns the layout, which has the place of each parameter.
    #[must_use]
    pub const fn layout(&self) -> &FlatLayout {
        &self.layout
    }

    /// Returns the rank that holds this shard, as its number in the shard group.
    #[must_use]
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the flat shard, right padding included.
    #[must_use]
    pub const fn shard(&self) -> &Tensor {
        &self.shard
    }

    /// Returns the part of a flat shard that belongs to parameter `param` (its position in
    /// `layout().fqns()`), as a one-dimensional view; `None` if the shard has none of it. `flat` is
    /// the shard itself or a tensor of the same length: a gradient or an optimizer state.
    ///
    /// # Errors
    /// candle's errors, for a tensor that is too short.
    ///
    /// # Panics
    /// If the layout has no such parameter.
    pub fn piece(&self, param: usize, flat: &Tensor) -> Result<Option<Tensor>, FlatError> {
        match self.layout.shard_param_info(param, self.rank) {
            Some(info) => Ok(Some(flat.narrow(
                0,
                info.offset_in_shard,
                info.numel_in_shard,
            )?)),
            None => Ok(None),
        }
    }

    /// Returns parameter `param` of a flat shard as a sharded tensor of views, which has no boxes
    /// if the shard has none of it.
    ///
    /// # Errors
    /// The same as [`Self::piece`].
    ///
    /// # Panics
    /// The same as [`Self::piece`].
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use fsdp_flat::FlatParameter;
    /// use fsdp_layout::{FlatLayout, TensorBox};
    /// // 2 x 3 elements and 2 more, half of them on each of two ranks: the first cut goes through a row.
    /// let layout = FlatLayout::new(vec![("weight".into(), vec![2, 3]), ("bias".into(), vec![2])], 0, 2)?;
    /// let shard = Tensor::arange(0f32, 4f32, &Device::Cpu)?;
    /// let flat = FlatParameter::new(layout, 0, shard)?;
    /// let weight = flat.sharded(0, flat.shard())?;
    /// assert_eq!(weight.boxes(), [TensorBox::new(vec![0, 0], vec![1, 3]), TensorBox::new(vec![1, 0], vec![1, 1])]);
    /// assert!(flat.sharded(1, flat.shard())?.shards().is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn sharded(&self, param: usize, flat: &Tensor) -> Result<ShardedTensor, FlatError> {
        let shape = &self.layout.shapes()[param];
        match self.piece(param, flat)? {
            Some(piece) => {
                ShardedTensor::from_flat(shape, self.layout.param_boxes(param, self.rank), &piece)
            }
            // A rank without elements still knows the dtype and the shape.
            None => ShardedTensor::new(flat.dtype(), shape.clone(), Vec::new()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flatten::{flatten_tensors, get_shard};
    use candle_core::Device;
    use fsdp_layout::TensorBox;
    use proptest::prelude::*;

    #[test]
    fn a_rank_of_the_whole_job_is_refused_where_fewer_share_the_parameter() {
        let layout = FlatLayout::new(vec![("p".to_owned(), vec![4])], 0, 2).unwrap();
        let shard = Tensor::zeros(2, candle_core::DType::F32, &Device::Cpu).unwrap();
        assert!(matches!(
            FlatParameter::new(layout, 5, shard),
            Err(FlatError::NoSuchRank {
                rank: 5,
                world_size: 2
            })
        ));
    }

    proptest! {
        /// Sharding any parameters over any ranks and reading the boxes of all ranks gives back the
        /// parameters: padding (42, or zeros on the right) is in no box.
        #[test]
        fn padding_never_leaks(
            shapes in prop::collection::vec(prop::collection::vec(1usize..5, 0..4), 1..5),
            align in prop::sample::select(vec![0usize, 2, 4, 8]),
            world_size in 1usize..6,
        ) {
            let names = shapes.iter().enumerate().map(|(i, shape)| (format!("p{i}"), shape.clone()));
            let layout = FlatLayout::new(names.collect(), align, world_size).unwrap();
            let tensors: Vec<Tensor> = shapes.iter().enumerate().map(|(i, shape)| {
                let numel: usize = shape.iter().product();
                let start = 1000.0 * (i + 1) as f32;
                Tensor::arange(start, start + numel as f32, &Device::Cpu).unwrap().reshape(shape.as_slice()).unwrap()
            }).collect();
            let flat = flatten_tensors(&layout, &tensors).unwrap();
            let ranks: Vec<FlatParameter> = (0..world_size).map(|rank| {
                let (shard, _) = get_shard(&flat, rank, world_size).unwrap();
                FlatParameter::new(layout.clone(), rank, shard).unwrap()
            }).collect();
            for (param, tensor) in tensors.iter().enumerate() {
                let shards = ranks.iter().flat_map(|r| r.sharded(param, r.shard()).unwrap().shards().to_vec()).collect();
                let all = ShardedTensor::new(tensor.dtype(), shapes[param].clone(), shards).unwrap();
                let whole = all.read_box(&TensorBox::whole(&shapes[param])).unwrap();
                prop_assert_eq!(
                    whole.flatten_all().unwrap().to_vec1::<f32>().unwrap(),
                    tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap()
                );
            }
        }
    }
}
