//! The memory of tensors on a GPU: read, changed, released, filled. `cargo xtask gpu` runs this
//! where a GPU is.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::{DType, Device, Tensor};
use fsdp_flat::storage::{
    Contents, HostBytes, HostBytesMut, HostSlice, HostSliceMut, is_released, release, to_device,
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
