//! The `nccl` backend does what every backend must do, and on GPU memory what it does on the
//! host's. One rank a GPU, on the GPUs that there are, or several on one: `cargo xtask gpu` runs
//! this where there is one.
//!
//! A test starts this very program again for each rank, where `rank_process` finds out from its
//! environment what to do.

#![expect(clippy::unwrap_used, reason = "these are tests, and their helpers")]
#![expect(
    clippy::disallowed_methods,
    reason = "what ranks tell the test is no checkpoint"
)]
#![expect(unsafe_code, reason = "streams whose order the tests see to")]

mod conformance;
mod nccl_ranks;
mod processes;
#[expect(dead_code, reason = "other test programs ask for the rest")]
mod stand_in;

use std::fmt::Debug;
use std::sync::Arc;

use conformance::{Case, DEADLINE, cases};
use cudarc::driver::{CudaContext, CudaStream, DeviceRepr};
use fsdp_comm::device::{DeviceSlice, DeviceSliceMut};
use fsdp_comm::{
    BackendKind, CommError, Element, ProcessGroup, ReduceOp, init_process_group_within,
};
use fsdp_layout::DeviceMesh;
use half::{bf16, f16};
use processes::{Ranks, SHORT_DEADLINE};
use rustix::process::Signal;
use stand_in::{counts, origins_of_communicators};

/// Returns `true` for a case in which a rank ends badly, so that it needs processes of its own.
fn is_fatal(case: &Case) -> bool {
    case.casualty.is_some() || case.name.contains("leaves") || case.name.contains("that left")
}

/// The number of ranks, where it is not that of the GPUs: a single GPU can have several.
const RANKS: &str = "FSDP_TEST_RANKS";

/// Returns the number of ranks: each GPU gets one, unless a variable tells another number.
fn ranks() -> usize {
    std::env::var(RANKS).map_or_else(|_| gpus(), |ranks| ranks.parse().unwrap())
}

/// Returns the number of GPUs.
fn gpus() -> usize {
    let count =
        CudaContext::device_count().expect("`cargo xtask gpu` runs this only where a GPU is");
    usize::try_from(count).unwrap()
}

/// Starts ranks that do `what`.
fn start_ranks(world_size: usize, what: &str, variables: &[(&str, &str)]) -> Ranks {
    nccl_ranks::start(gpus(), world_size, what, variables)
}

/// The program of each rank.
#[test]
fn rank_process() {
    let Ok(what) = std::env::var("FSDP_TEST") else {
        return;
    };
    // Drivers and NCCL may take seconds to start, so that the short deadline is for what comes
    // then.
    let group = init_process_group_within(BackendKind::Nccl, DEADLINE).unwrap();
    let group = if what.starts_with("until") {
        group.with_deadline(SHORT_DEADLINE)
    } else {
        group
    };
    assert_eq!(group.backend_name(), "nccl");
    match what.as_str() {
        "gpu memory" => return gpu_memory(&group),
        "copies are counted" => return without_copies(&group),
        "gpu memory of a subgroup" => return subgroups(&group),
        "gpu memory that does not fit" => return misfits(&group),
        "until a rank dies" => return until_a_rank_dies(&group),
        "until a rank dies in a split" => return until_a_rank_dies_in_a_split(&group),
        "until a rank is lost in a gather" => return until_queued_fails(&group, Queued::Gather),
        "until a rank is lost in a reduction" => {
            return until_queued_fails(&group, Queued::Reduction);
        }
        "an expected order" => return expected_order(&group),
        "an order that all leave" => return order_that_all_leave(&group),
        "an order that one leaves" => return order_that_one_leaves(&group),
        "an order that one ends early" => return order_that_one_ends_early(&group),
        "an order in which one is wrong" => return order_in_which_one_is_wrong(&group),
        "an order in which one is late" => return order_in_which_one_is_late(&group),
        "queued" => return queued(group),
        "computation before" => return computation_before(&group),
        "a rank that gives up" => return rank_that_gives_up(&group),
        _ => {}
    }
    let mut chosen: Vec<Case> = cases()
        .into_iter()
        .filter(|case| case.name.starts_with(&what))
        .collect();
    chosen.retain(|case| {
        case.worlds.contains(&group.world_size()) && (case.name == what || !is_fatal(case))
    });
    let last = chosen.pop().expect("there is such a case");
    for case in chosen {
        case.run(group.clone());
    }
    last.run(group);
}

/// Runs all cases of one file.
fn run_all(prefix: &str) {
    let world_size = ranks();
    let fits = |case: &Case| case.name.starts_with(prefix) && case.worlds.contains(&world_size);
    let cases: Vec<Case> = cases().into_iter().filter(fits).collect();
    if cases.iter().any(|case| !is_fatal(case)) {
        start_ranks(world_size, prefix, &[]).assert_casualties(&[]);
    }
    for case in cases.iter().filter(|case| is_fatal(case)) {
        start_ranks(world_size, &case.name, &[]).assert_casualties(case.casualty.as_slice());
    }
}

macro_rules! conformance_tests {
    ($($name:ident: $prefix:literal,)*) => {
        $(#[test] fn $name() { run_all($prefix); })*
    };
}

conformance_tests! {
    operations: "operations",
    reductions: "reductions",
    groups: "groups",
    objects: "objects",
    invalid_arguments: "invalid",
    traffic: "traffic",
    mismatches: "mismatch",
    faults: "faults",
}

#[test]
fn gpu_memory_is_moved_as_the_hosts_is() {
    start_ranks(ranks(), "gpu memory", &[]).assert_casualties(&[]);
}

/// The stand-in for the driver counts copies between the host and the GPU; the driver itself does
/// not.
#[test]
fn collectives_copy_nothing_to_or_from_the_host() {
    if counts().is_some() {
        start_ranks(ranks(), "copies are counted", &[]).assert_casualties(&[]);
    }
}

#[test]
fn operations_return_before_they_are_done_and_streams_wait_for_them() {
    // Collectives that take longer than the work around them, and the other way round.
    for slow in [
        ("CUDA_STAND_IN_LINK_US", "300000"),
        ("CUDA_STAND_IN_DELAY_US", "20000"),
    ] {
        start_ranks(ranks(), "queued", &[slow]).assert_casualties(&[]);
    }
}

/// The stand-in can make the work before an operation take longer than the deadline.
#[test]
fn the_deadline_of_an_operation_begins_when_the_work_before_it_is_done() {
    let delay = ("CUDA_STAND_IN_DELAY_US", "100000");
    start_ranks(ranks(), "computation before", &[delay]).assert_casualties(&[]);
}

/// A kernel of the stand-in, like one of NCCL, ends if another rank aborts, with an undefined
/// result.
#[test]
fn an_operation_that_another_rank_gives_up_fails_although_the_gpu_ends_it() {
    if ranks() > 1 && counts().is_some() {
        let delay = ("CUDA_STAND_IN_DELAY_US", "100000");
        start_ranks(ranks(), "a rank that gives up", &[delay]).assert_casualties(&[]);
    }
}

/// Sends a signal to the last rank when all ranks have queued an operation, which the link of the
/// stand-in holds up. The others' errors name it.
fn lose_the_last_rank_of_a_queue(what: &str, signal: Signal) {
    let world_size = ranks();
    if world_size == 1 || counts().is_none() {
        return;
    }
    let logs = tempfile::tempdir().unwrap();
    let variables = [
        ("CUDA_STAND_IN_LINK_US", "2000000"),
        ("FSDP_TEST_LOG", logs.path().to_str().unwrap()),
    ];
    let mut ranks = start_ranks(world_size, what, &variables);
    ranks.wait_until(|| std::fs::read_dir(logs.path()).unwrap().count() == world_size);
    ranks.signal(world_size - 1, signal);
    let survivors: Vec<usize> = (0..world_size - 1).collect();
    ranks.wait_for(
        &survivors,
        SHORT_DEADLINE + std::time::Duration::from_secs(7),
    );
}

#[test]
fn a_rank_that_dies_within_a_queued_gather_is_named() {
    lose_the_last_rank_of_a_queue("until a rank is lost in a gather", Signal::KILL);
}

#[test]
fn a_rank_that_stops_within_a_queued_gather_is_named() {
    lose_the_last_rank_of_a_queue("until a rank is lost in a gather", Signal::STOP);
}

#[test]
fn a_rank_that_dies_within_a_queued_reduction_is_named() {
    lose_the_last_rank_of_a_queue("until a rank is lost in a reduction", Signal::KILL);
}

#[test]
fn a_rank_that_stops_within_a_queued_reduction_is_named() {
    lose_the_last_rank_of_a_queue("until a rank is lost in a reduction", Signal::STOP);
}

#[test]
fn calls_that_all_ranks_expect_take_no_agreement() {
    start_ranks(ranks(), "an expected order", &[]).assert_casualties(&[]);
}

#[test]
fn an_order_that_all_ranks_leave_is_agreed_on_anew() {
    start_ranks(ranks(), "an order that all leave", &[]).assert_casualties(&[]);
}

#[test]
fn a_rank_that_leaves_the_order_alone_is_named_with_its_call() {
    start_ranks(ranks(), "an order that one leaves", &[]).assert_casualties(&[]);
}

#[test]
fn a_rank_that_leaves_out_an_expected_call_is_named_with_its_next_one() {
    for delay in ["0", "3000"] {
        let delay = ("CUDA_STAND_IN_DELAY_US", delay);
        start_ranks(ranks(), "an order that one ends early", &[delay]).assert_casualties(&[]);
    }
}

#[test]
fn a_rank_that_is_wrong_in_an_expected_call_is_named_with_its_error() {
    start_ranks(ranks(), "an order in which one is wrong", &[]).assert_casualties(&[]);
}

#[test]
fn a_rank_that_does_not_make_an_expected_call_is_named_at_the_deadline() {
    start_ranks(ranks(), "an order in which one is late", &[]).assert_casualties(&[]);
}

#[test]
fn subgroups_have_communicators_of_their_own() {
    start_ranks(ranks(), "gpu memory of a subgroup", &[]).assert_casualties(&[]);
}

#[test]
fn gpu_memory_that_does_not_fit_is_refused_on_all_ranks() {
    start_ranks(ranks(), "gpu memory that does not fit", &[]).assert_casualties(&[]);
}

/// Starts ranks that do `what`, kills or stops the last one with `signal` once they have begun, and
/// checks that the others then succeed: `what` expects the error that names the lost rank. Does
/// nothing with a single rank, which has no others.
fn lose_the_last_rank(what: &str, signal: Signal) {
    let world_size = ranks();
    if world_size == 1 {
        return;
    }
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut ranks = start_ranks(
        world_size,
        what,
        &[("FSDP_TEST_LOG", log.path().to_str().unwrap())],
    );
    ranks.wait_until(|| std::fs::metadata(log.path()).unwrap().len() > 0);
    ranks.signal(world_size - 1, signal);
    let survivors: Vec<usize> = (0..world_size - 1).collect();
    ranks.wait_for(
        &survivors,
        SHORT_DEADLINE + std::time::Duration::from_secs(5),
    );
}

#[test]
fn a_rank_that_dies_within_a_collective_is_named() {
    lose_the_last_rank("until a rank dies", Signal::KILL);
}

#[test]
fn a_rank_that_stops_within_a_collective_is_named_at_the_deadline() {
    lose_the_last_rank("until a rank dies", Signal::STOP);
}

#[test]
fn a_rank_that_dies_while_groups_are_made_is_named() {
    lose_the_last_rank("until a rank dies in a split", Signal::KILL);
}

#[test]
fn a_rank_that_stops_while_groups_are_made_is_named_at_the_deadline() {
    lose_the_last_rank("until a rank dies in a split", Signal::STOP);
}

fn stream(group: &ProcessGroup) -> Arc<CudaStream> {
    let device = group.device().expect("NCCL moves GPU memory");
    CudaContext::new(device.ordinal()).unwrap().default_stream()
}

fn until_a_rank_dies(group: &ProcessGroup) {
    let stream = stream(group);
    let mut memory = stream.clone_htod(&vec![1f32; 1 << 20]).unwrap();
    let error = loop {
        let mut buffer = DeviceSliceMut::new(&mut memory, &stream);
        match group
            .device()
            .unwrap()
            .all_reduce(&mut buffer, ReduceOp::Max)
        {
            Ok(_) => std::fs::write(std::env::var("FSDP_TEST_LOG").unwrap(), "going").unwrap(),
            Err(error) => break error,
        }
    };
    assert_names_the_last_rank(group, error);
    // The ranks that remain go on, in GPU memory too.
    let rest = group.shrink(&[group.world_size() - 1]).unwrap();
    let stream = self::stream(&rest);
    let mut memory = stream.clone_htod(&[1f32; 1000]).unwrap();
    let mut buffer = DeviceSliceMut::new(&mut memory, &stream);
    rest.device()
        .unwrap()
        .all_reduce(&mut buffer, ReduceOp::Sum)
        .unwrap();
    drop(buffer);
    let sums = stream.clone_dtoh(&memory).unwrap();
    assert_eq!(sums, [rest.world_size() as f32; 1000]);
}

/// Makes groups until the last rank, which is in none of them, is lost.
fn until_a_rank_dies_in_a_split(group: &ProcessGroup) {
    let survivors: Vec<usize> = (0..group.world_size() - 1).collect();
    let error = loop {
        match group.subgroup(&survivors) {
            Ok(_) => std::fs::write(std::env::var("FSDP_TEST_LOG").unwrap(), "going").unwrap(),
            Err(error) => break error,
        }
    };
    assert_names_the_last_rank(group, error);
}

/// Checks that an error names the last rank as lost, and that the group has failed with it.
fn assert_names_the_last_rank(group: &ProcessGroup, error: CommError) {
    let victim = group.world_size() - 1;
    assert!(
        matches!(error, CommError::RankLeft { rank, .. } if rank == victim),
        "{error:?}"
    );
    assert_eq!(group.barrier(), Err(error));
}

/// The operations that a rank is lost in.
#[derive(Debug, Clone, Copy)]
enum Queued {
    Gather,
    Reduction,
}

/// Queues two operations, which the last rank does not survive, and expects the error that names it
/// in the first, wherever it is asked for.
fn until_queued_fails(group: &ProcessGroup, kind: Queued) {
    let (stream, device, ranks) = (stream(group), group.device().unwrap(), group.world_size());
    let mut small = stream.clone_htod(&[1f32; 1000]).unwrap();
    let mut large = stream.clone_htod(&vec![2f32; 1000 * ranks]).unwrap();
    let mut queue = || {
        let small = &mut small;
        let large = &mut large;
        match kind {
            Queued::Gather => device.all_gather_into(
                &mut DeviceSliceMut::new(large, &stream),
                &DeviceSlice::new(small, &stream),
            ),
            Queued::Reduction => device.reduce_scatter(
                &mut DeviceSliceMut::new(small, &stream),
                &DeviceSlice::new(large, &stream),
                ReduceOp::Avg,
            ),
        }
    };
    let pending = [queue().unwrap(), queue().unwrap()];
    let log = std::env::var("FSDP_TEST_LOG").unwrap();
    std::fs::write(format!("{log}/{}", group.rank()), "queued").unwrap();
    let error = pending[0].wait().unwrap_err();
    let victim = group.world_size() - 1;
    let operation = match kind {
        Queued::Gather => "all_gather",
        Queued::Reduction => "reduce_scatter",
    };
    assert!(
        matches!(
            &error,
            CommError::RankLeft { rank, operation: named, sequence: 0, .. }
                if *rank == victim && named == operation
        ),
        "{error:?}"
    );
    assert_eq!(pending[0].is_done(), Err(error.clone()));
    assert_eq!(pending[1].wait(), Err(error.clone()));
    assert_eq!(queue().unwrap_err(), error);
    assert_eq!(group.barrier(), Err(error));
    // The memory is free for other things.
    stream.memset_zeros(&mut small).unwrap();
    assert_eq!(stream.clone_dtoh(&small).unwrap(), [0.0; 1000]);
}

/// Adds up a number of each rank `calls` times, in GPU memory of `numel` elements, and returns the
/// sum.
fn sums(group: &ProcessGroup, numel: usize, calls: usize) -> Result<f32, CommError> {
    let (stream, device) = (stream(group), group.device().unwrap());
    let mut sum = 0.0;
    for _ in 0..calls {
        let mut memory = stream.clone_htod(&vec![1f32; numel]).unwrap();
        let mut buffer = DeviceSliceMut::new(&mut memory, &stream);
        device.all_reduce(&mut buffer, ReduceOp::Sum)?.wait()?;
        drop(buffer);
        sum += stream.clone_dtoh(&memory).unwrap()[0];
    }
    Ok(sum)
}

/// Lets all ranks expect three calls of 1000 elements.
fn expect_three_calls(group: &ProcessGroup) {
    let device = group.device().unwrap();
    device.begin_step(false).unwrap();
    sums(group, 1000, 3).unwrap();
    let hash = device.calls_hash();
    let hashes = group.all_gather_object(&hash).unwrap();
    assert!(hashes.iter().all(|other| *other == hash));
    device.begin_step(true).unwrap();
}

/// Checks that expected calls send nothing between hosts, and that others do.
fn expected_order(group: &ProcessGroup) {
    let ranks = group.world_size() as f32;
    let agreed = |work: &dyn Fn()| {
        let before = group.traffic();
        work();
        let since = group.traffic().since(&before);
        assert!(since.agreements > 0 || since.control_bytes_sent == 0);
        since.agreements
    };
    let sum = |calls: usize| assert_eq!(sums(group, 1000, calls), Ok(calls as f32 * ranks));
    let one = u64::from(group.world_size() > 1);
    expect_three_calls(group);
    assert_eq!(agreed(&|| sum(1)), 0);
    // Calls on the host's memory are agreed on, and change nothing for the others.
    assert_eq!(agreed(&|| group.barrier().unwrap()), one);
    let mut numbers = vec![0u8; 10_000 * group.world_size()];
    group
        .all_gather_into(&mut numbers, &vec![group.rank() as u8; 10_000])
        .unwrap();
    assert_eq!(numbers.last(), Some(&(group.world_size() as u8 - 1)));
    assert_eq!(agreed(&|| sum(2)), 0);
    // What comes behind the expected calls is agreed on.
    assert_eq!(agreed(&|| sum(1)), one);
    assert_eq!(agreed(&|| sum(1)), one);
}

/// Leaves the expected order on all ranks, for a while on purpose.
fn order_that_all_leave(group: &ProcessGroup) {
    let ranks = group.world_size() as f32;
    for _ in 0..3 {
        expect_three_calls(group);
        assert_eq!(sums(group, 1000, 2), Ok(2.0 * ranks));
        // Ranks come at different times.
        std::thread::sleep(std::time::Duration::from_millis(20 * group.rank() as u64));
        assert_eq!(sums(group, 7, 2), Ok(2.0 * ranks));
        group.barrier().unwrap();
        assert_eq!(sums(group, 1000, 1), Ok(ranks));
    }
}

/// Lets the last rank leave the expected order alone: every rank gets the error that tells who made
/// which call.
fn order_that_one_leaves(group: &ProcessGroup) {
    if group.world_size() == 1 {
        return;
    }
    expect_three_calls(group);
    let last = group.world_size() - 1;
    sums(group, 1000, 1).unwrap();
    let numel = if group.rank() == last { 77 } else { 1000 };
    let error = sums(group, numel, 1).unwrap_err();
    let CommError::Mismatch { calls, .. } = &error else {
        panic!("{error:?}");
    };
    let of_last = calls.iter().find(|call| call.ranks == [last]).unwrap();
    assert!(of_last.call.contains("of 77 float32"), "{error}");
    assert_eq!(calls.len(), 2, "{error}");
    assert_eq!(group.barrier(), Err(error));
}

/// Lets the last rank go on without the expected calls that the others have made: to an operation
/// on the host, or to the next step.
fn order_that_one_ends_early(group: &ProcessGroup) {
    if group.world_size() == 1 {
        return;
    }
    let last = group.world_size() - 1;
    let all: Vec<usize> = (0..group.world_size()).collect();
    for begins_step in [false, true] {
        let group = group.subgroup(&all).unwrap().unwrap();
        expect_three_calls(&group);
        let stream = stream(&group);
        let device = group.device().unwrap();
        let mut memory = stream.clone_htod(&[1f32; 1000]).unwrap();
        let mut sum = || {
            let mut buffer = DeviceSliceMut::new(&mut memory, &stream);
            device.all_reduce(&mut buffer, ReduceOp::Sum)
        };
        let earlier = sum().unwrap();
        // The last rank may go on before the others make the call that it leaves out, which then
        // fails already.
        let outcome = if group.rank() == last {
            Ok(())
        } else {
            sum().map(drop)
        };
        let outcome = outcome.and_then(|()| {
            if begins_step {
                device.begin_step(false)
            } else {
                group.all_gather_object(&group.rank()).map(drop)
            }
        });
        let error = outcome.unwrap_err();
        let CommError::Mismatch { calls, .. } = &error else {
            panic!("{error:?}");
        };
        let of_last = calls.iter().find(|call| call.ranks == [last]).unwrap();
        assert!(!of_last.call.contains("in GPU memory"), "{error}");
        assert_eq!(calls.len(), 2, "{error}");
        assert_eq!(group.barrier(), Err(error.clone()));
        // The GPU may not have done the call before, which then ends at once on all ranks too.
        let ended = earlier.wait();
        assert!(ended == Ok(()) || ended == Err(error), "{ended:?}");
    }
}

/// Lets the last rank make an expected call with arguments that do not fit.
fn order_in_which_one_is_wrong(group: &ProcessGroup) {
    if group.world_size() == 1 {
        return;
    }
    let (stream, device) = (stream(group), group.device().unwrap());
    let (rank, last) = (group.rank(), group.world_size() - 1);
    let gather = |numel: usize| {
        let input = stream.clone_htod(&[1f32; 8]).unwrap();
        let mut output = stream.clone_htod(&vec![0f32; numel]).unwrap();
        let mut output = DeviceSliceMut::new(&mut output, &stream);
        device
            .all_gather_into(&mut output, &DeviceSlice::new(&input, &stream))?
            .wait()
    };
    device.begin_step(false).unwrap();
    gather(8 * group.world_size()).unwrap();
    group.barrier().unwrap();
    device.begin_step(true).unwrap();
    let error = gather(if rank == last {
        3
    } else {
        8 * group.world_size()
    })
    .unwrap_err();
    match &error {
        CommError::InvalidArgument { .. } => assert_eq!(rank, last),
        CommError::RankFailed { failures, .. } => assert_eq!(failures[0].rank, last),
        other => panic!("{other:?}"),
    }
}

/// Lets the last rank make no further call, while the others make expected ones.
fn order_in_which_one_is_late(group: &ProcessGroup) {
    if group.world_size() == 1 {
        return;
    }
    expect_three_calls(group);
    let group = group.with_deadline(SHORT_DEADLINE);
    let last = group.world_size() - 1;
    sums(&group, 1000, 1).unwrap();
    if group.rank() == last {
        std::thread::sleep(SHORT_DEADLINE + std::time::Duration::from_secs(3));
        return;
    }
    let error = sums(&group, 1000, 1).unwrap_err();
    assert!(
        matches!(&error, CommError::Timeout { missing, .. } if *missing == [last]),
        "{error:?}"
    );
}

/// Queues operations, and uses their results without waiting on the host.
fn queued(group: ProcessGroup) {
    let (rank, ranks) = (group.rank(), group.world_size());
    let numel = 50_000;
    let context = CudaContext::new(group.device().unwrap().ordinal()).unwrap();
    let (stream, other_stream) = (context.default_stream(), context.new_stream().unwrap());
    // Event by event: cudarc makes no stream wait for another by itself.
    // SAFETY: the streams below wait for each other by events.
    unsafe { context.disable_event_tracking() };
    let device = group.device().unwrap();
    let host_waits = || counts().map(|counts| counts.process.host_waits);
    let waits = host_waits();
    let is_stand_in = waits.is_some();
    let mut gathered = Vec::new();
    for round in 0..3 {
        let mut input = stream
            .clone_htod(&vec![(rank + round) as f32; numel])
            .unwrap();
        // Some work before the operation.
        for _ in 0..4 {
            input = stream.clone_dtod(&input).unwrap();
        }
        // SAFETY: it is filled before it is read.
        let mut output = unsafe { stream.alloc::<f32>(numel * ranks) }.unwrap();
        let pending = device
            .all_gather_into(
                &mut DeviceSliceMut::new(&mut output, &stream),
                &DeviceSlice::new(&input, &stream),
            )
            .unwrap();
        assert!(!is_stand_in || !pending.is_done().unwrap());
        // The memory of the input is used for something else as soon as it may be.
        drop(input);
        let reused = stream.clone_htod(&vec![f32::NAN; numel]).unwrap();
        // Another stream sees the result behind the operation.
        pending.delay(&other_stream).unwrap();
        let copy = other_stream.clone_dtod(&output).unwrap();
        gathered.push((output, copy, pending, reused));
    }
    assert_eq!(host_waits(), waits);
    for (round, (output, copy, pending, _)) in gathered.into_iter().enumerate() {
        let expected: Vec<f32> = (0..ranks)
            .flat_map(|rank| vec![(rank + round) as f32; numel])
            .collect();
        assert!(other_stream.clone_dtoh(&copy).unwrap() == expected);
        pending.wait().unwrap();
        assert!(pending.is_done().unwrap());
        assert!(stream.clone_dtoh(&output).unwrap() == expected);
    }
    // What is still queued when the group is dropped is done.
    let mut last = stream.clone_htod(&vec![1f32; numel]).unwrap();
    let pending = device
        .all_reduce(&mut DeviceSliceMut::new(&mut last, &stream), ReduceOp::Sum)
        .unwrap();
    drop(group);
    pending.wait().unwrap();
    assert!(stream.clone_dtoh(&last).unwrap() == vec![ranks as f32; numel]);
}

fn computation_before(group: &ProcessGroup) {
    let group = group.with_deadline(std::time::Duration::from_millis(500));
    reduce_after(&group, 15).unwrap();
    group.with_deadline(DEADLINE).barrier().unwrap();
}

/// Queues a reduction behind so many other works, and waits for it.
fn reduce_after(group: &ProcessGroup, works: usize) -> Result<(), CommError> {
    let stream = stream(group);
    let mut memory = stream.clone_htod(&[1f32; 10]).unwrap();
    let pieces: Vec<_> = (0..works)
        .map(|_| stream.clone_dtod(&memory).unwrap())
        .collect();
    let mut slice = DeviceSliceMut::new(&mut memory, &stream);
    let pending = group
        .device()
        .unwrap()
        .all_reduce(&mut slice, ReduceOp::Sum)?;
    drop(pieces);
    pending.wait()
}

fn rank_that_gives_up(group: &ProcessGroup) {
    let (timeout, works) = match group.rank() {
        0 => (std::time::Duration::from_millis(500), 0),
        _ => (DEADLINE, 30),
    };
    let group = group.with_deadline(timeout);
    // After this, all ranks queue it.
    group.barrier().unwrap();
    let error = reduce_after(&group, works).unwrap_err();
    assert!(matches!(error, CommError::Timeout { .. }), "{error}");
    assert_eq!(group.barrier(), Err(error));
}

fn without_copies(group: &ProcessGroup) {
    let (stream, device, ranks) = (stream(group), group.device().unwrap(), group.world_size());
    let mut small = stream.clone_htod(&[1f32; 1000]).unwrap();
    let mut large = stream.clone_htod(&vec![2f32; 1000 * ranks]).unwrap();
    let host_copies = || {
        let demands = counts().unwrap().process;
        [demands.copies_up, demands.copies_down]
    };
    let before = host_copies();
    {
        let (mut large, mut small) = (
            DeviceSliceMut::new(&mut large, &stream),
            DeviceSliceMut::new(&mut small, &stream),
        );
        device.all_reduce(&mut small, ReduceOp::Sum).unwrap();
        device.broadcast(&mut large, 0).unwrap();
    }
    device
        .all_gather_into(
            &mut DeviceSliceMut::new(&mut large, &stream),
            &DeviceSlice::new(&small, &stream),
        )
        .unwrap();
    let (from, counts) = (DeviceSlice::new(&large, &stream), vec![1000; ranks]);
    device
        .reduce_scatter(
            &mut DeviceSliceMut::new(&mut small, &stream),
            &from,
            ReduceOp::Avg,
        )
        .unwrap();
    drop(from);
    let input = stream.clone_dtod(&large).unwrap();
    let (from, mut to) = (
        DeviceSlice::new(&input, &stream),
        DeviceSliceMut::new(&mut large, &stream),
    );
    device
        .all_to_all_uneven(&mut to, &counts, &from, &counts)
        .unwrap();
    drop((from, to));
    assert_eq!(host_copies(), before);
    assert_eq!(stream.clone_dtoh(&small).unwrap(), [ranks as f32; 1000]);
    assert!(host_copies()[1] > before[1], "copies are counted");
}

fn subgroups(group: &ProcessGroup) {
    let (rank, ranks) = (group.rank(), group.world_size());
    let others: Vec<usize> = (0..ranks).filter(|other| other % 2 == rank % 2).collect();
    // Both are made by all, one after the other.
    let even: Vec<usize> = (0..ranks).step_by(2).collect();
    let odd: Vec<usize> = (1..ranks).step_by(2).collect();
    let made = [even, odd]
        .into_iter()
        .filter(|of| !of.is_empty())
        .filter_map(|of| group.subgroup(&of).unwrap());
    let own: Vec<ProcessGroup> = made.collect();
    assert_eq!(own.len(), 1);
    // Ranks outside of a group take part in its split too.
    let groups = ranks.min(2) as u64;
    if let Some(origins) = origins_of_communicators() {
        assert_eq!(origins, [u64::from(rank == 0), groups]);
    }
    let stream = stream(&own[0]);
    let mut memory = stream.clone_htod(&[rank as f32]).unwrap();
    let mut buffer = DeviceSliceMut::new(&mut memory, &stream);
    own[0]
        .device()
        .unwrap()
        .all_reduce(&mut buffer, ReduceOp::Sum)
        .unwrap();
    drop(buffer);
    assert_eq!(
        stream.clone_dtoh(&memory).unwrap(),
        [others.iter().sum::<usize>() as f32]
    );
    mesh_groups(group);
}

/// Makes all groups of a dimension at once, and checks that a rank has its place along it.
fn mesh_groups(group: &ProcessGroup) {
    let ranks = group.world_size();
    let rows = if ranks.is_multiple_of(2) { 2 } else { 1 };
    let mesh = DeviceMesh::new(&[rows, ranks / rows], &["replicate", "shard"], ranks).unwrap();
    for dim in [0, 1] {
        let own = group.mesh_group(&mesh, dim).unwrap();
        let stream = stream(&own);
        let input = stream.clone_htod(&[group.rank() as u32]).unwrap();
        let mut output = stream.alloc_zeros::<u32>(own.world_size()).unwrap();
        own.device()
            .unwrap()
            .all_gather_into(
                &mut DeviceSliceMut::new(&mut output, &stream),
                &DeviceSlice::new(&input, &stream),
            )
            .unwrap();
        let gathered = stream.clone_dtoh(&output).unwrap();
        let expected: Vec<u32> = own.global_ranks().iter().map(|&rank| rank as u32).collect();
        assert_eq!(gathered, expected);
    }
}

fn misfits(group: &ProcessGroup) {
    let (stream, ranks) = (stream(group), group.world_size());
    let device = group.device().unwrap();
    let input = stream.clone_htod(&[1f32; 4]).unwrap();
    let mut output = stream.clone_htod(&vec![0f32; 4 * ranks + 1]).unwrap();
    let (mut to, from) = (
        DeviceSliceMut::new(&mut output, &stream),
        DeviceSlice::new(&input, &stream),
    );
    assert!(matches!(
        device.all_gather_into(&mut to, &from),
        Err(CommError::InvalidArgument { .. })
    ));
    assert!(matches!(
        device.broadcast(&mut to, ranks),
        Err(CommError::InvalidArgument { .. })
    ));
    let mut integers = stream.clone_htod(&[1i64; 4]).unwrap();
    let mut integers = DeviceSliceMut::new(&mut integers, &stream);
    assert!(matches!(
        device.all_reduce(&mut integers, ReduceOp::Avg),
        Err(CommError::UnsupportedReduction { .. })
    ));
    // The group goes on.
    device.all_reduce(&mut integers, ReduceOp::Sum).unwrap();
    group.barrier().unwrap();
}

/// Runs every operation on the GPU, and compares it with the same operation on the host.
fn gpu_memory(group: &ProcessGroup) {
    for numel in [1, 5, 1000, 300_000] {
        same_as_on_the_host(group, numel, |k| k as f32);
        same_as_on_the_host(group, numel, |k| (k % 100) as i64);
        same_as_on_the_host(group, numel, |k| (k % 50) as u8);
        // Exact, whatever the order.
        same_as_on_the_host(group, numel, |k| f16::from_f32((k % 8) as f32));
        same_as_on_the_host(group, numel, |k| bf16::from_f32((k % 8) as f32));
    }
}

fn same_as_on_the_host<T: Element + DeviceRepr + PartialEq + Debug>(
    group: &ProcessGroup,
    numel: usize,
    value: impl Fn(usize) -> T,
) {
    let (rank, ranks) = (group.rank(), group.world_size());
    let (stream, device) = (stream(group), group.device().unwrap());
    let upload = |host: &[T]| stream.clone_htod(host).unwrap();
    let zeros = |len: usize| vec![T::zeroed(); len];
    let piece: Vec<T> = (0..numel).map(|k| value((k + rank) % 7)).collect();
    let whole: Vec<T> = (0..numel * ranks).map(|k| value((k + rank) % 5)).collect();

    let mut expected = zeros(numel * ranks);
    group.all_gather_into(&mut expected, &piece).unwrap();
    let (input, mut output) = (upload(&piece), upload(&zeros(numel * ranks)));
    device
        .all_gather_into(
            &mut DeviceSliceMut::new(&mut output, &stream),
            &DeviceSlice::new(&input, &stream),
        )
        .unwrap();
    assert_eq!(stream.clone_dtoh(&output).unwrap(), expected);

    for op in [ReduceOp::Sum, ReduceOp::Max] {
        let mut expected = zeros(numel);
        group.reduce_scatter(&mut expected, &whole, op).unwrap();
        let (input, mut output) = (upload(&whole), upload(&zeros(numel)));
        device
            .reduce_scatter(
                &mut DeviceSliceMut::new(&mut output, &stream),
                &DeviceSlice::new(&input, &stream),
                op,
            )
            .unwrap();
        assert_eq!(stream.clone_dtoh(&output).unwrap(), expected, "{op}");

        let mut expected = piece.clone();
        group.all_reduce(&mut expected, op).unwrap();
        let mut buffer = upload(&piece);
        device
            .all_reduce(&mut DeviceSliceMut::new(&mut buffer, &stream), op)
            .unwrap();
        assert_eq!(stream.clone_dtoh(&buffer).unwrap(), expected, "{op}");
    }
    for root in 0..ranks {
        let mut expected = piece.clone();
        group.broadcast(&mut expected, root).unwrap();
        let mut buffer = upload(&piece);
        device
            .broadcast(&mut DeviceSliceMut::new(&mut buffer, &stream), root)
            .unwrap();
        assert_eq!(stream.clone_dtoh(&buffer).unwrap(), expected);

        let is_root = rank == root;
        let mut expected = zeros(numel * ranks);
        group
            .gather(is_root.then_some(&mut expected[..]), &piece, root)
            .unwrap();
        let (input, mut output) = (upload(&piece), upload(&zeros(numel * ranks)));
        let mut to = DeviceSliceMut::new(&mut output, &stream);
        device
            .gather(
                is_root.then_some(&mut to),
                &DeviceSlice::new(&input, &stream),
                root,
            )
            .unwrap();
        drop(to);
        assert_eq!(stream.clone_dtoh(&output).unwrap(), expected);

        let mut expected = zeros(numel);
        group
            .scatter(&mut expected, is_root.then_some(&whole[..]), root)
            .unwrap();
        let (input, mut output) = (upload(&whole), upload(&zeros(numel)));
        let from = DeviceSlice::new(&input, &stream);
        device
            .scatter(
                &mut DeviceSliceMut::new(&mut output, &stream),
                is_root.then_some(&from),
                root,
            )
            .unwrap();
        drop(from);
        assert_eq!(stream.clone_dtoh(&output).unwrap(), expected);
    }
    // Rank r sends `r + to` elements to each rank `to`.
    let send: Vec<usize> = (0..ranks).map(|to| rank + to).collect();
    let input: Vec<T> = (0..send.iter().sum())
        .map(|k| value((k * 3 + rank) % 7))
        .collect();
    let mut expected = zeros(input.len());
    group
        .all_to_all_uneven(&mut expected, &send, &input, &send)
        .unwrap();
    if !input.is_empty() {
        let (from, mut to) = (upload(&input), upload(&zeros(input.len())));
        let (mut to_slice, from) = (
            DeviceSliceMut::new(&mut to, &stream),
            DeviceSlice::new(&from, &stream),
        );
        device
            .all_to_all_uneven(&mut to_slice, &send, &from, &send)
            .unwrap();
        drop((to_slice, from));
        assert_eq!(stream.clone_dtoh(&to).unwrap(), expected);
    } else {
        // A rank alone sends itself nothing.
        assert_eq!(ranks, 1);
    }
}
