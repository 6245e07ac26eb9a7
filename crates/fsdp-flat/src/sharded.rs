//! A tensor of which each rank owns some boxes.

use candle_core::{Device, Tensor};
use fsdp_layout::boxes::copy_runs;
use fsdp_layout::{DType, TensorBox};

use crate::error::FlatError;
use crate::non_temporal::non_temporal_copy;
use crate::storage::{HostBytes, HostBytesMut, is_same_view, owned_copy, share_storage, zeros};
use crate::{dtype, storage};

/// One box of a [`ShardedTensor`] and its elements.
#[derive(Debug, Clone)]
pub struct LocalShard {
    /// The place in the global tensor.
    pub bounds: TensorBox,
    /// Its elements; the shape is `bounds.sizes`.
    pub tensor: Tensor,
}

/// A tensor of which this rank owns some boxes: the counterpart of both torch's ShardedTensor and
/// DTensor.
///
/// Dim-0 chunks, flat ranges of a FlatParameter, 2-D mesh placements and empty shards are all
/// described by lists of boxes. A clone shares the elements, like a clone of a candle tensor.
#[derive(Debug, Clone)]
pub struct ShardedTensor {
    dtype: candle_core::DType,
    shape: Vec<usize>,
    shards: Vec<LocalShard>,
}

impl ShardedTensor {
    /// Makes a sharded tensor of `shape` from the local boxes `shards`; there may be none.
    ///
    /// # Errors
    /// Boxes must lie inside the shape, must not overlap, and must have tensors of their size and
    /// of `dtype`.
    pub fn new(
        dtype: candle_core::DType,
        shape: Vec<usize>,
        shards: Vec<LocalShard>,
    ) -> Result<Self, FlatError> {
        // Ranks own few boxes, so comparing each with all before it is quick.
        for (index, shard) in shards.iter().enumerate() {
            if !shard.bounds.fits(&shape) {
                return Err(FlatError::OutOfBounds {
                    bounds: shard.bounds.clone(),
                    shape,
                });
            }
            if shard.tensor.dims() != shard.bounds.sizes {
                let name = format!("shard {}", shard.bounds);
                return Err(FlatError::shape(
                    name,
                    &shard.bounds.sizes,
                    shard.tensor.dims(),
                ));
            }
            if shard.tensor.dtype() != dtype {
                return Err(FlatError::Candle(candle_core::Error::UnexpectedDType {
                    msg: "shard of a sharded tensor",
                    expected: dtype,
                    got: shard.tensor.dtype(),
                }));
            }
            if let Some(earlier_shard) = shards[..index]
                .iter()
                .find(|earlier_shard| earlier_shard.bounds.intersect(&shard.bounds).is_some())
            {
                return Err(FlatError::Overlap {
                    first: earlier_shard.bounds.clone(),
                    second: shard.bounds.clone(),
                });
            }
        }
        Ok(ShardedTensor {
            dtype,
            shape,
            shards,
        })
    }

    /// Makes a sharded tensor whose boxes are views of a flat tensor. The boxes lie in `flat` one
    /// after the other, in the order of `boxes`, each row-major. Nothing is copied.
    ///
    /// # Errors
    /// `flat` must be one-dimensional and as long as all boxes together; boxes as in [`Self::new`].
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use fsdp_flat::ShardedTensor;
    /// use fsdp_layout::boxes::boxes_of_flat_range;
    /// // Elements 2..5 of a 2 x 3 tensor: the end of the first row, and most of the second.
    /// let flat = Tensor::new(&[2f32, 3., 4.], &Device::Cpu)?;
    /// let sharded = ShardedTensor::from_flat(&[2, 3], boxes_of_flat_range(&[2, 3], 2..5), &flat)?;
    /// assert_eq!(sharded.shards()[1].tensor.to_vec2::<f32>()?, [[3., 4.]]);
    /// # Ok::<(), fsdp_flat::FlatError>(())
    /// ```
    pub fn from_flat(
        shape: &[usize],
        boxes: Vec<TensorBox>,
        flat: &Tensor,
    ) -> Result<Self, FlatError> {
        let mut shards = Vec::with_capacity(boxes.len());
        let mut offset = 0;
        for bounds in boxes {
            let numel = bounds.numel();
            let tensor = flat
                .narrow(0, offset, numel)?
                .reshape(bounds.sizes.as_slice())?;
            offset += numel;
            shards.push(LocalShard { bounds, tensor });
        }
        if offset != flat.elem_count() {
            return Err(FlatError::shape(
                "flat tensor of boxes",
                &[offset],
                flat.dims(),
            ));
        }
        Self::new(flat.dtype(), shape.to_vec(), shards)
    }

    /// Makes a sharded tensor with one box that is all of `tensor`. Nothing is copied.
    #[must_use]
    pub fn from_whole(tensor: &Tensor) -> Self {
        ShardedTensor {
            dtype: tensor.dtype(),
            shape: tensor.dims().to_vec(),
            shards: vec![LocalShard {
                bounds: TensorBox::whole(tensor.dims()),
                tensor: tensor.clone(),
            }],
        }
    }

    /// Makes a sharded tensor with `boxes`, filled with zeros, in new memory on the CPU.
    ///
    /// # Errors
    /// A dtype that has no plain bytes, or boxes as in [`Self::new`].
    pub fn zeros(
        dtype: candle_core::DType,
        shape: &[usize],
        boxes: &[TensorBox],
    ) -> Result<Self, FlatError> {
        Self::from_boxes(shape, boxes, dtype, zeros)
    }

    /// Makes a sharded tensor with `boxes`, which take no memory until they are filled: see
    /// [`storage::unfilled`].
    ///
    /// # Errors
    /// The same as [`Self::zeros`].
    pub fn unfilled(
        dtype: candle_core::DType,
        shape: &[usize],
        boxes: &[TensorBox],
    ) -> Result<Self, FlatError> {
        Self::from_boxes(shape, boxes, dtype, storage::unfilled)
    }

    /// Makes a sharded tensor with `boxes` on a GPU, whose elements are undefined: write them
    /// before you read them.
    ///
    /// # Errors
    /// The same as [`Self::zeros`], and CUDA's.
    #[cfg(feature = "cuda")]
    pub fn undefined_on(
        device: &candle_core::CudaDevice,
        dtype: candle_core::DType,
        shape: &[usize],
        boxes: &[TensorBox],
    ) -> Result<Self, FlatError> {
        Self::from_boxes(shape, boxes, dtype, |shape, dtype| {
            storage::cuda::undefined(device, dtype, shape)
        })
    }

    /// Makes a sharded tensor with `boxes`, whose tensors `make` makes from their shapes.
    fn from_boxes(
        shape: &[usize],
        boxes: &[TensorBox],
        dtype: candle_core::DType,
        make: impl Fn(&[usize], candle_core::DType) -> Result<Tensor, FlatError>,
    ) -> Result<Self, FlatError> {
        let mut shards = Vec::with_capacity(boxes.len());
        for bounds in boxes {
            shards.push(LocalShard {
                bounds: bounds.clone(),
                tensor: make(&bounds.sizes, dtype)?,
            });
        }
        Self::new(dtype, shape.to_vec(), shards)
    }

    /// Returns candle's dtype of the elements.
    #[must_use]
    pub const fn dtype(&self) -> candle_core::DType {
        self.dtype
    }

    /// Returns the dtype as files name it.
    ///
    /// # Errors
    /// candle's dummy dtypes have no name.
    pub fn file_dtype(&self) -> Result<DType, FlatError> {
        dtype::file_dtype(self.dtype)
    }

    /// Returns the global shape.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns this rank's boxes and their elements; empty on a rank that owns nothing.
    #[must_use]
    pub fn shards(&self) -> &[LocalShard] {
        &self.shards
    }

    /// Returns this rank's boxes.
    #[must_use]
    pub fn boxes(&self) -> Vec<TensorBox> {
        self.shards
            .iter()
            .map(|shard| shard.bounds.clone())
            .collect()
    }

    /// Returns `true` if this rank's boxes hold all of a box.
    #[must_use]
    pub fn covers(&self, wanted: &TensorBox) -> bool {
        // No two of the boxes overlap, so no element is counted twice.
        let local_numel: usize = self
            .shards
            .iter()
            .filter_map(|shard| shard.bounds.intersect(wanted))
            .map(|part| part.numel())
            .sum();
        local_numel == wanted.numel()
    }

    /// Returns `true` if `other` has the same boxes, and each pair of boxes is a view of the same
    /// elements of one storage. Copying one to the other would change nothing.
    #[must_use]
    pub fn is_same_view(&self, other: &Self) -> bool {
        self.shape == other.shape
            && self.shards.len() == other.shards.len()
            && self
                .shards
                .iter()
                .zip(&other.shards)
                .all(|(own_shard, other_shard)| {
                    own_shard.bounds == other_shard.bounds
                        && is_same_view(&own_shard.tensor, &other_shard.tensor)
                })
    }

    /// Returns the number of elements on this rank.
    #[must_use]
    pub fn local_numel(&self) -> usize {
        self.shards.iter().map(|shard| shard.bounds.numel()).sum()
    }

    /// Returns a copy of the values in new memory.
    ///
    /// # Errors
    /// candle's errors.
    pub fn copy(&self) -> Result<Self, FlatError> {
        self.map(owned_copy)
    }

    /// Copies the values to another device. Values that are there already are shared.
    ///
    /// # Errors
    /// candle's errors.
    pub fn to_device(&self, device: &Device) -> Result<Self, FlatError> {
        self.map(|tensor| storage::to_device(tensor, device))
    }

    /// Casts the values to another dtype. A rank that has none of them gets the dtype too.
    ///
    /// # Errors
    /// candle's errors.
    pub fn to_dtype(&self, dtype: candle_core::DType) -> Result<Self, FlatError> {
        let cast = self.map(|tensor| Ok(tensor.to_dtype(dtype)?))?;
        Ok(ShardedTensor { dtype, ..cast })
    }

    /// Returns a sharded tensor with the same boxes, where `f` has replaced the tensor of each box.
    /// `f` must keep the shapes, and the dtype: a rank without boxes would not learn of another one
    /// ([`Self::to_dtype`] changes it everywhere).
    ///
    /// # Errors
    /// The errors of `f` and of [`Self::new`].
    pub fn map(
        &self,
        mut f: impl FnMut(&Tensor) -> Result<Tensor, FlatError>,
    ) -> Result<Self, FlatError> {
        let mut shards = Vec::with_capacity(self.shards.len());
        for shard in &self.shards {
            shards.push(LocalShard {
                bounds: shard.bounds.clone(),
                tensor: f(&shard.tensor)?,
            });
        }
        // Without boxes there is no tensor from which to learn the new dtype, so the old one is
        // kept.
        let dtype = shards
            .first()
            .map_or(self.dtype, |shard| shard.tensor.dtype());
        Self::new(dtype, self.shape.clone(), shards)
    }

    /// Returns the whole tensor, if this rank's boxes hold all of it. Nothing is copied if a single
    /// box does.
    ///
    /// # Errors
    /// [`FlatError::NotCovered`] if elements are on other ranks.
    pub fn to_whole(&self) -> Result<Tensor, FlatError> {
        let whole = TensorBox::whole(&self.shape);
        match self.shards.iter().find(|shard| shard.bounds == whole) {
            Some(shard) => Ok(shard.tensor.clone()),
            None => self.read_box(&whole),
        }
    }

    /// Copies the elements of one box to new memory on the CPU. This rank's boxes must cover that
    /// box.
    ///
    /// # Errors
    /// [`FlatError::NotCovered`] if some elements are not here.
    pub fn read_box(&self, wanted: &TensorBox) -> Result<Tensor, FlatError> {
        let target = zeros(&wanted.sizes, self.dtype)?;
        // No two of the boxes overlap, so all elements are there if as many as wanted were copied.
        let mut copied = 0;
        for shard in &self.shards {
            copied += copy_overlap(&shard.tensor, &shard.bounds, &target, wanted)?;
        }
        if copied != wanted.numel() {
            return Err(FlatError::NotCovered {
                wanted: wanted.clone(),
            });
        }
        Ok(target)
    }
}

/// Copies the elements that two boxes of one tensor share, into the destination's memory; returns
/// how many. If the two tensors are views of one storage, the source is copied first.
///
/// # Errors
/// Both tensors must have their boxes' sizes and one dtype; the destination must be contiguous.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fsdp_flat::sharded::copy_overlap;
/// use fsdp_layout::TensorBox;
/// let (src, dst) = (Tensor::new(&[1f32, 2., 3.], &Device::Cpu)?, Tensor::new(&[7f32, 7., 7.], &Device::Cpu)?);
/// let at = |start| TensorBox::new(vec![start], vec![3]);
/// assert_eq!(copy_overlap(&src, &at(0), &dst, &at(1))?, 2);
/// assert_eq!(dst.to_vec1::<f32>()?, [2., 3., 7.]);
/// # Ok::<(), fsdp_flat::FlatError>(())
/// ```
pub fn copy_overlap(
    src: &Tensor,
    src_box: &TensorBox,
    dst: &Tensor,
    dst_box: &TensorBox,
) -> Result<usize, FlatError> {
    for (tensor, bounds) in [(src, src_box), (dst, dst_box)] {
        if tensor.dims() != bounds.sizes {
            let name = format!("box {bounds}");
            return Err(FlatError::shape(name, &bounds.sizes, tensor.dims()));
        }
    }
    let Some(overlap) = src_box.intersect(dst_box) else {
        return Ok(0);
    };
    if src.dtype() != dst.dtype() {
        return Err(FlatError::Candle(
            candle_core::Error::DTypeMismatchBinaryOp {
                lhs: src.dtype(),
                rhs: dst.dtype(),
                op: "copy between boxes",
            },
        ));
    }
    let element_bytes = src.dtype().size_in_bytes();
    // While a storage is held for change it cannot be read, so a source in the same storage is
    // copied first.
    let source = if share_storage(src, dst) {
        src.force_contiguous()?
    } else {
        src.contiguous()?
    };
    let source_guard = HostBytes::read(&source)?;
    let mut destination_guard = HostBytesMut::write(dst)?;
    // Dereference the guards once, outside the loop, because each use of a guard looks its slice up
    // again.
    let source_bytes: &[u8] = &source_guard;
    let destination_bytes: &mut [u8] = &mut destination_guard;
    for run in copy_runs(&overlap, src_box, dst_box) {
        let source_range = run.src * element_bytes..(run.src + run.len) * element_bytes;
        let destination_range = run.dst * element_bytes..(run.dst + run.len) * element_bytes;
        non_temporal_copy(
            &mut destination_bytes[destination_range],
            &source_bytes[source_range],
        );
    }
    destination_guard.finish()?;
    Ok(overlap.numel())
}

#[cfg(test)]
mod tests {
    use super::*;
    use fsdp_layout::boxes::boxes_of_flat_range;

    fn arange(n: usize) -> Tensor {
        Tensor::arange(0f32, n as f32, &Device::Cpu).unwrap()
    }

    #[test]
    fn flat_pieces_are_views_of_the_flat_tensor() {
        let flat = arange(8);
        let boxes = boxes_of_flat_range(&[3, 5], 3..11);
        let sharded = ShardedTensor::from_flat(&[3, 5], boxes, &flat).unwrap();
        assert_eq!(sharded.local_numel(), 8);
        crate::storage::HostSliceMut::<f32>::write(&flat).unwrap()[2] = 9.0;
        assert_eq!(
            sharded.shards()[1].tensor.to_vec2::<f32>().unwrap(),
            [[9., 3., 4., 5., 6.]]
        );
        assert!(matches!(
            sharded.to_whole(),
            Err(FlatError::NotCovered { .. })
        ));
        let part = sharded
            .read_box(&TensorBox::new(vec![1, 1], vec![1, 2]))
            .unwrap();
        assert_eq!(part.to_vec2::<f32>().unwrap(), [[3., 4.]]);
    }

    #[test]
    fn a_rank_without_boxes_is_cast_too() {
        let boxes = boxes_of_flat_range(&[8], 0..8);
        let full = ShardedTensor::from_flat(&[8], boxes, &arange(8)).unwrap();
        let empty = ShardedTensor::new(full.dtype(), vec![8], Vec::new()).unwrap();
        for sharded in [full, empty] {
            let cast = sharded.to_dtype(candle_core::DType::BF16).unwrap();
            assert_eq!(cast.dtype(), candle_core::DType::BF16);
            assert_eq!(cast.boxes(), sharded.boxes());
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let shard = |offsets: &[usize], sizes: &[usize]| LocalShard {
            bounds: TensorBox::new(offsets.to_vec(), sizes.to_vec()),
            tensor: zeros(sizes, candle_core::DType::F32).unwrap(),
        };
        let new = |shards| ShardedTensor::new(candle_core::DType::F32, vec![4, 2], shards);
        assert!(new(vec![shard(&[0, 0], &[2, 2]), shard(&[2, 0], &[2, 2])]).is_ok());
        assert!(matches!(
            new(vec![shard(&[3, 0], &[2, 2])]),
            Err(FlatError::OutOfBounds { .. })
        ));
        assert!(matches!(
            new(vec![shard(&[0, 0], &[2, 2]), shard(&[1, 1], &[2, 1])]),
            Err(FlatError::Overlap { .. })
        ));
        let mut wrong = shard(&[0, 0], &[2, 2]);
        wrong.tensor = arange(4);
        assert!(matches!(
            new(vec![wrong]),
            Err(FlatError::ShapeMismatch { .. })
        ));
        assert!(ShardedTensor::from_flat(&[4], vec![], &arange(1)).is_err());
        let boxes = vec![TensorBox::new(vec![3], vec![2])];
        assert!(matches!(
            ShardedTensor::from_flat(&[4], boxes, &arange(2)),
            Err(FlatError::OutOfBounds { .. })
        ));
        let bounds = TensorBox::new(vec![0], vec![3]);
        let too_short = copy_overlap(&arange(3), &bounds, &arange(2), &bounds);
        assert!(matches!(too_short, Err(FlatError::ShapeMismatch { .. })));
    }

    #[test]
    fn views_of_one_storage_are_recognized_and_can_be_copied_to_each_other() {
        let flat = arange(8);
        let of = |start, flat: &Tensor| {
            let boxes = boxes_of_flat_range(&[2, 4], start..start + 4);
            ShardedTensor::from_flat(&[2, 4], boxes, &flat.narrow(0, start, 4).unwrap()).unwrap()
        };
        assert!(of(2, &flat).is_same_view(&of(2, &flat)));
        assert!(!of(2, &flat).is_same_view(&of(1, &flat)));
        assert!(!of(2, &flat).is_same_view(&of(2, &arange(8))));
        assert!(
            !of(2, &flat).is_same_view(&of(2, &flat.to_dtype(candle_core::DType::F64).unwrap()))
        );
        let square = flat.narrow(0, 0, 4).unwrap().reshape((2, 2)).unwrap();
        assert!(!is_same_view(&square, &square.t().unwrap()));
        let bounds = TensorBox::new(vec![0], vec![4]);
        let (low, high) = (flat.narrow(0, 1, 4).unwrap(), flat.narrow(0, 3, 4).unwrap());
        assert_eq!(copy_overlap(&low, &bounds, &high, &bounds).unwrap(), 4);
        assert_eq!(
            flat.to_vec1::<f32>().unwrap(),
            [0., 1., 2., 1., 2., 3., 4., 7.]
        );
    }

    #[test]
    fn boxes_that_cover_everything_make_the_whole() {
        let full = arange(12).reshape((4, 3)).unwrap();
        let shards = [(0, 1), (1, 3)].map(|(start, len)| LocalShard {
            bounds: TensorBox::new(vec![start, 0], vec![len, 3]),
            tensor: full.narrow(0, start, len).unwrap(),
        });
        let sharded =
            ShardedTensor::new(candle_core::DType::F32, vec![4, 3], shards.into()).unwrap();
        assert_eq!(
            sharded.to_whole().unwrap().to_vec2::<f32>().unwrap(),
            full.to_vec2::<f32>().unwrap()
        );
    }
}
