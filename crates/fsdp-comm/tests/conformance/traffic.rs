//! Counters tell what went to and came from other ranks, and nothing else.

use fsdp_comm::{Operation, ProcessGroup, ReduceOp, Traffic};

use super::Case;

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("traffic: of tensors", 1..=5, |group| of_tensors(&group)),
        Case::new("traffic: of objects and control", 1..=3, |group| {
            of_objects_and_control(&group)
        }),
    ]
}

fn measured(group: &ProcessGroup, run: impl FnOnce(&ProcessGroup)) -> Traffic {
    let before = group.traffic();
    run(group);
    group.traffic().since(&before)
}

fn of_tensors(group: &ProcessGroup) {
    let (rank, world_size) = (group.rank(), group.world_size());
    let others = world_size as u64 - 1;
    // Inline and not.
    for len in [10usize, 6400] {
        let bytes = 4 * len as u64;
        let whole = vec![1f32; len * world_size];
        let sent_and_received = |traffic: Traffic| {
            assert_eq!(traffic.object_bytes_sent + traffic.object_bytes_received, 0);
            assert_eq!(traffic.collectives.values().sum::<u64>(), 1);
            (traffic.tensor_bytes_sent, traffic.tensor_bytes_received)
        };
        let traffic = measured(group, |group| {
            group
                .all_gather_into(&mut whole.clone(), &whole[..len])
                .unwrap()
        });
        assert_eq!(traffic.count(Operation::AllGather), 1);
        assert_eq!(sent_and_received(traffic), (bytes * others, bytes * others));

        let traffic = measured(group, |group| {
            group
                .reduce_scatter(&mut vec![0.0; len], &whole, ReduceOp::Sum)
                .unwrap()
        });
        assert_eq!(sent_and_received(traffic), (bytes * others, bytes * others));

        let traffic = measured(group, |group| {
            group.broadcast(&mut vec![0f32; len], 0).unwrap()
        });
        let is_root = u64::from(rank == 0);
        assert_eq!(
            sent_and_received(traffic),
            (is_root * bytes * others, (1 - is_root) * bytes)
        );

        let traffic = measured(group, |group| {
            let input = (rank == 0).then_some(&whole[..]);
            group.scatter(&mut vec![0f32; len], input, 0).unwrap();
        });
        assert_eq!(
            sent_and_received(traffic),
            (is_root * bytes * others, (1 - is_root) * bytes)
        );

        let traffic = measured(group, |group| {
            let mut output = whole.clone();
            group
                .gather((rank == 0).then_some(&mut output[..]), &whole[..len], 0)
                .unwrap();
        });
        assert_eq!(
            sent_and_received(traffic),
            ((1 - is_root) * bytes, is_root * bytes * others)
        );

        // A sub-group's traffic is the rank's.
        let traffic = measured(group, |group| {
            if let Some(sub) = group.subgroup(&[0]).unwrap() {
                sub.all_reduce(&mut vec![1f32; len], ReduceOp::Sum).unwrap();
            }
        });
        assert_eq!(traffic.count(Operation::AllReduce), is_root);
        assert_eq!(traffic.tensor_bytes(), 0);
    }
    // A large all-reduce sends each rank's segment of the input, and then its own segment to all.
    let traffic = measured(group, |group| {
        group
            .all_reduce(&mut vec![1f32; 64 * 60 * 4], ReduceOp::Sum)
            .unwrap()
    });
    let segment = (64 * 60 * 4 / world_size * 4) as u64;
    if 64 * 60 * 4 % (world_size * 64) == 0 {
        assert_eq!(
            (traffic.tensor_bytes_sent, traffic.tensor_bytes_received),
            (2 * segment * others, 2 * segment * others)
        );
    }
    assert_eq!(traffic.count(Operation::AllReduce), 1);
}

fn of_objects_and_control(group: &ProcessGroup) {
    let others = group.world_size() as u64 - 1;
    let traffic = measured(group, |group| {
        group.barrier().unwrap();
        group.agree("save", Ok::<_, String>(())).unwrap();
    });
    assert_eq!(
        traffic.tensor_bytes() + traffic.object_bytes_sent + traffic.object_bytes_received,
        0
    );
    assert_eq!(traffic.control_bytes_sent > 0, others > 0);
    assert_eq!(
        (
            traffic.count(Operation::Barrier),
            traffic.count(Operation::Agree)
        ),
        (1, 1)
    );
    let traffic = measured(group, |group| {
        let value = Ok::<_, String>(Some(7u8));
        group.broadcast_result("save", value, 0).unwrap();
    });
    assert_eq!(traffic.count(Operation::BroadcastResult), 1);
    let sent = if group.rank() == 0 { others } else { 0 };
    assert_eq!(traffic.object_bytes_sent, sent);
    for len in [10, 10_000] {
        let traffic = measured(group, |group| {
            group.all_gather_object(&vec![7u8; len]).unwrap();
        });
        assert_eq!(traffic.tensor_bytes(), 0);
        assert!(
            traffic.object_bytes_sent >= len as u64 * others
                && traffic.object_bytes_sent <= (len as u64 + 8) * others
        );
        assert_eq!(traffic.object_bytes_received, traffic.object_bytes_sent);
    }
}
