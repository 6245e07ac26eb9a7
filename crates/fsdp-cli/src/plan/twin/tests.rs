//! Saves of many ranks, planned small enough for every run of the tests; and the large one, by
//! hand.

use super::super::models::find_units;
use super::super::state::OptimizerState;
use super::*;
use crate::failure::CommandError;
use fsdp_layout::DType;

fn state(model: &str) -> JobState {
    JobState::from_model(
        find_units(model).unwrap(),
        DType::F32,
        OptimizerState::Adamw,
    )
    .unwrap()
}

#[test]
fn eight_billion_parameters_on_256_ranks_are_planned_in_both_layouts() {
    let state = state("llama-8b");
    let bytes = state.total_bytes();
    for layout in [Layout::Flat, Layout::Rows] {
        for replicas in [1, 8] {
            let planned = plan(
                &state,
                &JobShape {
                    ranks: 256,
                    replicas,
                    ranks_per_host: 8,
                    layout,
                },
            )
            .unwrap();
            // Every byte is written once, and each rank holds its part of it.
            assert!(planned.file_lengths.iter().sum::<u64>() > bytes);
            let held = *planned.held_bytes.iter().max().unwrap();
            assert!(held >= bytes * replicas as u64 / 256);
            assert!(
                planned.payload_bytes.most < bytes / 256 * 11 / 10,
                "{:?}",
                planned.payload_bytes
            );
            assert!(
                planned.payload_bytes.least > 0,
                "{:?}",
                planned.payload_bytes
            );
            assert!(planned.box_count >= state.tensor_count() as u64);
            // Replicas send their boxes once, so they make the planner's work smaller.
            assert!(
                planned.received_bytes < if replicas == 1 { 32 << 20 } else { 8 << 20 },
                "{}",
                planned.received_bytes
            );
            assert!(planned.metadata_bytes > planned.box_count * 64);
        }
    }
}

#[test]
fn one_rank_holds_all_of_it() {
    let state = state("gpt2-124m");
    let planned = plan(
        &state,
        &JobShape {
            ranks: 1,
            replicas: 1,
            ranks_per_host: 8,
            layout: Layout::Flat,
        },
    )
    .unwrap();
    assert_eq!(planned.held_bytes, [state.total_bytes()]);
    let written_bytes =
        state.total_bytes() + state.values.iter().map(|(_, length)| length).sum::<u64>();
    assert_eq!(
        planned.payload_bytes,
        LeastMost {
            least: written_bytes,
            most: written_bytes
        }
    );
    assert_eq!(planned.box_count, state.tensor_count() as u64);
}

#[test]
fn ranks_that_do_not_make_equal_replicas_are_refused() {
    let error = plan(
        &state("gpt2-124m"),
        &JobShape {
            ranks: 10,
            replicas: 4,
            ranks_per_host: 8,
            layout: Layout::Rows,
        },
    )
    .unwrap_err();
    assert!(error.is::<CommandError>(), "{error}");
}

/// Takes gigabytes, and in a build without optimization minutes.
#[test]
#[ignore = "takes 2 GiB of memory"]
fn four_hundred_billion_parameters_on_16384_ranks_are_planned_in_one_process() {
    let planned = plan(
        &state("llama-405b"),
        &JobShape {
            ranks: 16_384,
            replicas: 8,
            ranks_per_host: 8,
            layout: Layout::Flat,
        },
    )
    .unwrap();
    assert_eq!(planned.file_lengths.len(), 16_384);
    assert!(planned.payload_bytes.least > 0);
}
