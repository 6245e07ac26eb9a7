//! The memory that a rank needs, counted by an allocator of its own.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use candle_core::{DType, Device, Tensor};
use fsdp_comm::run_local;
use fsdp_flat::ShardedTensor;
use fsdp_layout::TensorBox;
use fsdp_state::{
    GatherOptions, KeepOn, StateDict, gather_state_dict_into, reshard_sharded_tensor,
};

thread_local! {
    /// Bytes that this thread, which is a rank, has allocated and not freed; and the most since it
    /// was last reset.
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

struct Counting;

fn count(bytes: isize) {
    // A thread that is ending has no counters any more.
    let live = LIVE.try_with(|live| {
        live.set(live.get() + bytes);
        live.get()
    });
    if let Ok(live) = live {
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(live)));
    }
}

#[expect(unsafe_code, reason = "an allocator is unsafe to implement")]
// SAFETY: all calls go to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns the most memory that was in use while `f` ran, beyond the memory in use before.
fn peak(f: impl FnOnce()) -> usize {
    let before = LIVE.with(Cell::get);
    PEAK.with(|peak| peak.set(before));
    f();
    (PEAK.with(Cell::get) - before).unsigned_abs()
}

const MIB: usize = 1 << 20;
/// For everything that is no tensor.
const SLACK: usize = 256 << 10;

fn rows(rank: usize) -> TensorBox {
    TensorBox::new(vec![rank * 256, 0], vec![256, 1024])
}

/// Makes a rank's quarter of a tensor of 4 MiB.
#[cfg(test)]
fn quarter(rank: usize) -> ShardedTensor {
    let tensor = Tensor::full(rank as f32, 256 * 1024, &Device::Cpu).unwrap();
    ShardedTensor::from_flat(&[1024, 1024], vec![rows(rank)], &tensor).unwrap()
}

#[test]
fn ranks_that_keep_nothing_hold_no_whole_tensor_and_the_one_that_streams_holds_one() {
    let peaks = run_local(4, |group| {
        let state: StateDict = (0..6)
            .map(|k| (format!("p{k}"), quarter(group.rank()).into()))
            .collect();
        let options = GatherOptions {
            keep_on: KeepOn::Ranks(vec![2]),
            device: None,
        };
        let mut whole = 0;
        let peak = peak(|| {
            gather_state_dict_into(&state, &group, &options, |_, value| {
                whole += value.as_tensor().map_or(0, Tensor::elem_count);
                Ok(())
            })
            .unwrap();
        });
        assert_eq!(whole, if group.rank() == 2 { 6 * MIB } else { 0 });
        peak
    })
    .unwrap();
    for (rank, peak) in peaks.into_iter().enumerate() {
        let most = if rank == 2 { 4 * MIB + SLACK } else { SLACK };
        assert!(peak <= most, "rank {rank} needed {peak} bytes");
    }
}

#[test]
fn a_reshard_needs_what_is_wanted_sent_and_received_and_no_whole_tensor() {
    let peaks = run_local(4, |group| {
        let tensor = quarter(group.rank());
        let columns = [TensorBox::new(vec![0, group.rank() * 256], vec![1024, 256])];
        let mut resharded = None;
        let peak =
            peak(|| resharded = Some(reshard_sharded_tensor(&tensor, &columns, &group).unwrap()));
        let column = resharded.unwrap().shards()[0].tensor.clone();
        let sum = column
            .to_dtype(DType::F64)
            .unwrap()
            .sum_all()
            .unwrap()
            .to_scalar::<f64>()
            .unwrap();
        assert_eq!(sum, (1 + 2 + 3) as f64 * 256.0 * 256.0);
        peak
    })
    .unwrap();
    // A quarter wanted, three sixteenths sent and received; the sender's buffer may have grown by
    // doubling.
    for (rank, peak) in peaks.into_iter().enumerate() {
        assert!(peak <= 3 * MIB + SLACK, "rank {rank} needed {peak} bytes");
    }
}
