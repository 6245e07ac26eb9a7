//! The memory of tensors on a GPU: read, changed, released, filled. `cargo xtask gpu` runs this
//! where a GPU is.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::{DType, Device, Tensor};
use fsdp_flat::storage::{
    BufferCopy, Contents, GpuBuffer, GpuReader, HostBytes, HostBytesMut, HostCopies, HostMemory,
    HostSlice, HostSliceMut, Upload, copy_to_gpu, finish_uploads, is_released, release, to_device,
    zeros_on,
};
use fsdp_flat::{FlatError, ShardedTensor};

fn gpu() -> Device {
    Device::new_cuda(0).unwrap()
}

fn on_gpu(values: &[f32]) -> Tensor {
    Tensor::new(values, &Device::Cpu)
        .unwrap()
        .to_device(&gpu())
        .unwrap()
}

fn host(tensor: &Tensor) -> Vec<f32> {
    HostSlice::<f32>::read(tensor).unwrap().to_vec()
}

#[test]
fn views_are_read_and_changed_in_place() {
    let flat = on_gpu(&[0., 1., 2., 3., 4., 5.]);
    let view = flat.narrow(0, 2, 3).unwrap();
    assert_eq!(host(&view), [2., 3., 4.]);
    let mut data = HostSliceMut::<f32>::write(&view).unwrap();
    data.iter_mut().for_each(|x| *x *= 10.);
    data.finish().unwrap();
    assert_eq!(host(&flat), [0., 1., 20., 30., 40., 5.]);
    // The drop of the guard writes back, as `finish` does.
    HostBytesMut::write(&view).unwrap()[4..8].copy_from_slice(&7f32.to_ne_bytes());
    assert_eq!(HostBytes::read(&view).unwrap()[4..8], 7f32.to_ne_bytes());
    assert_eq!(host(&flat), [0., 1., 20., 7., 40., 5.]);
    assert!(HostSlice::<f64>::read(&view).is_err());
    let transposed = flat.reshape((2, 3)).unwrap().t().unwrap();
    assert!(matches!(
        HostSlice::<f32>::read(&transposed),
        Err(FlatError::NotContiguous { .. })
    ));
}

#[test]
fn released_memory_is_an_error_for_every_reader_and_comes_back() {
    let weight = on_gpu(&[1., 2., 3., 4.]).reshape((2, 2)).unwrap();
    let view = weight.narrow(0, 1, 1).unwrap();
    release(&weight).unwrap();
    assert!(is_released(&weight) && is_released(&view));
    assert!(matches!(
        HostSlice::<f32>::read(&weight),
        Err(FlatError::Freed { .. })
    ));
    assert!(matches!(
        HostBytesMut::write(&view),
        Err(FlatError::Freed { .. })
    ));
    assert!(weight.sqrt().is_err());
    Contents::new(vec![5f32, 6., 7., 8.])
        .move_into(&weight)
        .unwrap();
    assert!(!is_released(&weight));
    assert_eq!(host(&view), [7., 8.]);
    let source = on_gpu(&[0., 1., 2., 3., 4., 9.]);
    Contents::from_tensor(&source.narrow(0, 2, 4).unwrap())
        .unwrap()
        .move_into(&weight)
        .unwrap();
    assert_eq!(host(&weight), [2., 3., 4., 9.]);
    assert!(
        Contents::from_tensor(&source)
            .unwrap()
            .move_into(&weight)
            .is_err()
    );
    assert!(Contents::new(vec![0f32; 5]).move_into(&weight).is_err());
}

#[test]
fn large_tensors_go_to_the_host_through_pinned_memory() {
    // Several pieces, and a last one that is not whole.
    let numel = 11_000_001;
    let values: Vec<u32> = (0..numel)
        .map(|k: u32| k.wrapping_mul(2_654_435_761))
        .collect();
    let tensor = Tensor::from_vec(values.clone(), values.len(), &Device::Cpu).unwrap();
    let there = to_device(&tensor, &gpu()).unwrap();
    for range in [0..values.len(), 5..values.len() - 7] {
        let view = there.narrow(0, range.start, range.len()).unwrap();
        let back = to_device(&view, &Device::Cpu).unwrap();
        assert!(back.device().is_cpu());
        assert!(
            *HostSlice::<u32>::read(&back).unwrap() == values[range.clone()],
            "{range:?}"
        );
    }
}

/// Returns numbers that differ from byte to byte, on a GPU.
fn numbers(numel: u32) -> (Vec<u32>, Tensor) {
    let values: Vec<u32> = (0..numel).map(|k| k.wrapping_mul(2_654_435_761)).collect();
    let tensor = Tensor::from_vec(values.clone(), values.len(), &Device::Cpu).unwrap();
    (values, to_device(&tensor, &gpu()).unwrap())
}

/// Collects what a reader passes on.
fn collected(
    read: impl FnOnce(&mut dyn FnMut(&[u8]) -> Result<(), FlatError>) -> Result<(), FlatError>,
) -> Vec<u8> {
    let mut bytes = Vec::new();
    read(&mut |piece| {
        bytes.extend_from_slice(piece);
        Ok(())
    })
    .unwrap();
    bytes
}

/// Returns the bytes of some numbers.
fn bytes_of(values: &[u32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect()
}

#[test]
fn several_threads_read_pieces_and_a_reader_that_fails_harms_no_other() {
    let (values, tensor) = numbers(5_000_000);
    let expected = bytes_of(&values);
    let reader = GpuReader::begin(std::slice::from_ref(&tensor))
        .unwrap()
        .unwrap();
    std::thread::scope(|scope| {
        for range in [0..expected.len(), 4_000_001..9_000_003, 7..8, 5..5] {
            let (reader, tensor, expected) = (&reader, &tensor, &expected);
            scope.spawn(move || {
                let found = collected(|sink| reader.read(tensor, range.clone(), sink));
                assert!(found == expected[range.clone()], "{range:?}");
            });
        }
        let (reader, tensor) = (&reader, &tensor);
        scope.spawn(move || {
            for _ in 0..5 {
                let mut pieces = 0;
                let error = reader.read(tensor, 0..20_000_000, &mut |_| {
                    pieces += 1;
                    if pieces < 3 {
                        return Ok(());
                    }
                    Err(FlatError::Freed { shape: vec![3] })
                });
                assert!(matches!(error, Err(FlatError::Freed { shape }) if shape == [3]));
            }
        });
    });
    assert!(
        reader
            .read(&tensor, 0..20_000_001, &mut |_| Ok::<_, FlatError>(()))
            .is_err()
    );
    assert!(GpuReader::begin(&[]).unwrap().is_none());
}

#[test]
fn copies_have_the_values_of_their_time_in_pinned_memory_or_other() {
    for limit in [0, 3 << 20, usize::MAX] {
        let memory = HostMemory::new(limit);
        for turn in 0..2 {
            let (values, tensor) = numbers(9_000_000);
            let (others, other) = numbers(1000);
            // Neighbours, one within another, one that overlaps, and none at all.
            let ranges = [
                0..100,
                100..5_000_000,
                7_000_000..9_000_000,
                200..300,
                4_999_999..6_000_000,
                5..5,
            ];
            let views: Vec<Tensor> = ranges
                .iter()
                .map(|range| tensor.narrow(0, range.start, range.len()).unwrap())
                .collect();
            let mut copies = HostCopies::begin(&memory, &[other.clone(), views[3].clone()], &views)
                .unwrap()
                .unwrap();
            assert!(
                turn == 0 || limit < usize::MAX || copies.is_queued(),
                "the memory is kept"
            );
            HostBytesMut::write(&other).unwrap().fill(1);
            copies.queue().unwrap();
            assert!(copies.is_queued());
            copies.end().unwrap().order_before_changes().unwrap();
            // The GPU writes only when it has copied.
            let zeros = zeros_on(&[9_000_000], DType::U32, &gpu()).unwrap();
            tensor.slice_set(&zeros, 0, 0).unwrap();
            for (view, range) in views.iter().zip(ranges) {
                let len = range.len() * 4;
                let found = collected(|sink| {
                    assert!(copies.read(view, 0..len, sink)?);
                    Ok(())
                });
                assert!(
                    found == bytes_of(&values[range.clone()]),
                    "{range:?} {limit}"
                );
            }
            let found = collected(|sink| copies.read(&other, 40..80, sink).map(drop));
            assert!(found == bytes_of(&others[10..20]));
            let stranger = zeros.narrow(0, 0, 4).unwrap();
            assert!(
                !copies
                    .read(&stranger, 0..4, &mut |_| Ok::<_, FlatError>(()))
                    .unwrap()
            );
        }
    }
    assert!(
        HostCopies::begin(&HostMemory::new(0), &[], &[])
            .unwrap()
            .is_none()
    );
}

#[test]
fn memory_that_is_released_before_its_copy_is_read_is_an_error() {
    let (_, tensor) = numbers(100_000);
    let memory = HostMemory::new(usize::MAX);
    let mut copies = HostCopies::begin(&memory, &[], std::slice::from_ref(&tensor))
        .unwrap()
        .unwrap();
    copies.queue().unwrap();
    // Its end, because a GPU that reads freed memory has failed.
    copies.end().unwrap().order_before_changes().unwrap();
    tensor.device().synchronize().unwrap();
    release(&tensor).unwrap();
    let error = copies.read(&tensor, 0..4, &mut |_| Ok(()));
    assert!(matches!(error, Err(FlatError::Freed { .. })));
}

#[test]
fn uploads_fill_live_tensors_and_only_them() {
    let (values, tensor) = numbers(30_000_000);
    let mut expected = values;
    // More than the blocks have, and one that is longer than a block.
    let starts = (0..10_000_000).step_by(1_000_000);
    let ranges = starts.map(|start| start..start + 999_999);
    let ranges: Vec<_> = ranges.chain([10_000_000..29_000_000, 7..7]).collect();
    for round in 0..4u32 {
        for range in &ranges {
            let view = tensor.narrow(0, range.start, range.len()).unwrap();
            let mut upload = Upload::begin(&view).unwrap();
            let new: Vec<u32> = range.clone().map(|k| k as u32 ^ round).collect();
            upload.bytes_mut().copy_from_slice(&bytes_of(&new));
            expected[range.clone()].copy_from_slice(&new);
            upload.finish().unwrap();
        }
        drop(Upload::begin(&tensor.narrow(0, 0, 10).unwrap()).unwrap());
    }
    finish_uploads().unwrap();
    assert!(*HostSlice::<u32>::read(&tensor).unwrap() == expected[..]);
    let source = Tensor::new(&[7u32, 8, 9], &Device::Cpu).unwrap();
    assert!(copy_to_gpu(&source, &tensor.narrow(0, 4, 3).unwrap()).unwrap());
    assert!(copy_to_gpu(&source, &tensor.narrow(0, 4, 2).unwrap()).is_err());
    assert!(!copy_to_gpu(&tensor, &source).unwrap());
    expected[4..7].copy_from_slice(&[7, 8, 9]);
    assert!(*HostSlice::<u32>::read(&tensor).unwrap() == expected[..]);
    release(&tensor).unwrap();
    assert!(Upload::begin(&tensor).is_err());
}

#[test]
fn every_dtype_that_candle_has_there_crosses_with_its_bits() {
    for dtype in [
        DType::U8,
        DType::U32,
        DType::I64,
        DType::BF16,
        DType::F16,
        DType::F32,
        DType::F64,
    ] {
        let here = fsdp_flat::storage::zeros(&[3, 2], dtype).unwrap();
        HostBytesMut::write(&here)
            .unwrap()
            .iter_mut()
            .zip(1..)
            .for_each(|(byte, k)| *byte = k);
        let there = to_device(&here, &gpu()).unwrap();
        let back = to_device(&there, &Device::Cpu).unwrap();
        let bits = |tensor: &Tensor| HostBytes::read(tensor).unwrap().to_vec();
        assert_eq!(
            (bits(&back), bits(&there)),
            (bits(&here), bits(&here)),
            "{dtype:?}"
        );
        assert!(
            bits(&zeros_on(&[5], dtype, &gpu()).unwrap())
                .iter()
                .all(|&byte| byte == 0)
        );
    }
}

#[test]
fn boxes_move_between_devices() {
    let whole = Tensor::arange(0f32, 12f32, &Device::Cpu)
        .unwrap()
        .reshape((4, 3))
        .unwrap();
    let there = ShardedTensor::from_whole(&whole).to_device(&gpu()).unwrap();
    assert!(there.shards()[0].tensor.device().is_cuda());
    let back = there.to_device(&Device::Cpu).unwrap().to_whole().unwrap();
    assert_eq!(
        back.to_vec2::<f32>().unwrap(),
        whole.to_vec2::<f32>().unwrap()
    );
}

/// Checks what the other tests rely on: candle computes the same there as here.
#[test]
fn operations_give_the_values_of_the_cpu() {
    type Operation = fn(&Tensor, &Tensor, &Tensor) -> candle_core::Result<Tensor>;
    let operations: [(&str, Operation); 22] = [
        ("matmul", |x, _, _| x.matmul(&x.t()?)),
        ("matmul of a transposed one", |x, _, _| x.t()?.matmul(x)),
        ("matmul in batches", |x, _, _| {
            x.reshape((2, 2, 6))?.matmul(&x.reshape((2, 6, 2))?)
        }),
        ("sum of rows", |x, _, _| x.sum(1)),
        ("sum of columns", |x, _, _| x.sum_keepdim(0)),
        ("sum", |x, _, _| x.sum_all()),
        ("max", |x, _, _| x.max(1)),
        ("min of a transposed one", |x, _, _| x.t()?.min(0)),
        ("argmax", |x, _, _| x.argmax(1)?.to_dtype(x.dtype())),
        ("exp", |x, _, _| x.exp()),
        ("gelu", |x, _, _| x.gelu()),
        ("gelu_erf", |x, _, _| x.t()?.gelu_erf()),
        ("tanh", |x, _, _| x.tanh()),
        ("power", |x, _, _| x.abs()?.powf(1.5)),
        ("affine", |x, _, _| x.t()?.affine(2.0, -1.0)),
        ("broadcast", |x, row, _| {
            x.broadcast_mul(row)?.broadcast_sub(row)
        }),
        ("division", |x, row, _| {
            row.broadcast_div(&x.abs()?.affine(1.0, 1.0)?)
        }),
        ("comparison", |x, row, _| {
            x.broadcast_gt(row)?.where_cond(x, &x.neg()?)
        }),
        ("index_select", |x, _, ids| x.index_select(ids, 1)),
        ("index_add", |x, _, ids| {
            x.index_add(ids, &x.narrow(1, 0, 3)?.contiguous()?, 1)
        }),
        ("gather", |x, _, ids| {
            x.gather(&ids.reshape((1, 3))?.broadcast_as((4, 3))?.contiguous()?, 1)
        }),
        ("parts", |x, _, _| {
            Tensor::cat(&[&x.narrow(1, 1, 2)?, &x.narrow(1, 4, 2)?], 1)?
                .t()?
                .contiguous()
        }),
    ];
    let x: Vec<f32> = (0..24u8)
        .map(|k| (f32::from(k) * 0.7).sin() * 2.0)
        .collect();
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let run = |operation: Operation, device: &Device| {
            let x = Tensor::from_slice(&x, (4, 6), device)
                .unwrap()
                .to_dtype(dtype)
                .unwrap();
            let row = x.narrow(0, 1, 1).unwrap();
            let ids = Tensor::new(&[5u32, 0, 2], device).unwrap();
            let result = operation(&x, &row, &ids)
                .and_then(|result| result.to_dtype(DType::F32))
                .unwrap();
            (
                result.dims().to_vec(),
                HostSlice::<f32>::read(&result.flatten_all().unwrap())
                    .unwrap()
                    .to_vec(),
            )
        };
        let tolerance = if matches!(dtype, DType::F32 | DType::F64) {
            1e-5
        } else {
            3e-2
        };
        for (name, operation) in operations {
            let ((shape, there), (expected_shape, here)) =
                (run(operation, &gpu()), run(operation, &Device::Cpu));
            assert_eq!(shape, expected_shape, "{name} in {dtype:?}");
            let is_close = |(there, here): (&f32, &f32)| {
                (there - here).abs() <= tolerance * here.abs().max(1.0)
            };
            assert!(
                there.iter().zip(&here).all(is_close),
                "{name} in {dtype:?}: {there:?} is not {here:?}"
            );
        }
    }
}

#[test]
fn tensors_are_packed_and_unpacked_in_the_memory_of_a_gpu() {
    let (values, tensor) = numbers(3_000_000);
    let mut buffer = GpuBuffer::new(0).unwrap();
    assert!(buffer.view(1).is_err(), "there is no memory yet");
    buffer.reserve(48).unwrap();
    let part = tensor.narrow(0, 1_000_000, 3).unwrap();
    buffer.put_tensor(4, &part).unwrap();
    buffer.put_bytes(0, &[1, 2, 3, 4]).unwrap();
    buffer.put_zeros(16..24).unwrap();
    buffer.repeat_first_bytes(24, 2).unwrap();
    let expected = [
        vec![1, 2, 3, 4],
        bytes_of(&values[1_000_000..1_000_003]),
        vec![0; 8],
    ]
    .concat();
    let found = collected(|sink| buffer.read(0..48, sink));
    assert_eq!(found, [expected.clone(), expected].concat());
    assert_eq!(collected(|sink| buffer.read(5..5, sink)), [0_u8; 0]);
    assert!(buffer.put_tensor(40, &part).is_err(), "there is no room");
    assert!(
        buffer
            .put_tensor(0, &tensor.reshape((2, 1_500_000)).unwrap().t().unwrap())
            .is_err()
    );

    let target = on_gpu(&[1., 2., 3., 4.]).narrow(0, 1, 3).unwrap();
    let copies = [
        BufferCopy {
            source: 16,
            target: 8,
            len: 4,
        },
        BufferCopy {
            source: 4,
            target: 0,
            len: 4,
        },
    ];
    buffer.copy_to_tensor(&copies, &target).unwrap();
    let first = f32::from_bits(values[1_000_000]);
    let found = host(&target);
    assert_eq!(
        found.iter().map(|x| x.to_bits()).collect::<Vec<u32>>(),
        [first.to_bits(), 3f32.to_bits(), 0]
    );
    let too_far = BufferCopy {
        source: 0,
        target: 9,
        len: 4,
    };
    assert!(buffer.copy_to_tensor(&[too_far], &target).is_err());
    release(&target).unwrap();
    assert!(buffer.copy_to_tensor(&copies, &target).is_err());
}

#[test]
fn a_buffer_has_what_tensors_are_after_the_work_before_and_tensors_may_change_at_once() {
    let mut buffer = GpuBuffer::new(0).unwrap();
    let numel = 1 << 20;
    buffer.reserve(numel * 4).unwrap();
    for turn in 0..4 {
        let tensor = Tensor::ones(numel, DType::F32, &gpu()).unwrap();
        let tensor = (tensor * f64::from(turn)).unwrap();
        buffer.put_tensor(0, &tensor).unwrap();
        // Its memory is used again.
        drop(tensor);
        let other = Tensor::ones(numel, DType::F32, &gpu()).unwrap();
        let whole = BufferCopy {
            source: 0,
            target: 0,
            len: numel * 4,
        };
        buffer.copy_to_tensor(&[whole], &other).unwrap();
        let sum = other.sum_all().unwrap().to_scalar::<f32>().unwrap();
        assert_eq!(sum, (numel as f32) * (turn as f32));
    }
}
