//! Sub-groups are groups: of any ranks, of each other, at the same time.

use fsdp_comm::{ProcessGroup, ReduceOp};
use fsdp_layout::DeviceMesh;

use super::Case;

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("groups: of some ranks", 1..=5, |group| {
            of_some_ranks(&group)
        }),
        Case::new("groups: of a mesh", 4..=4, |group| of_a_mesh(&group)),
        Case::new("groups: at the same time", 2..=4, |group| {
            at_the_same_time(&group)
        }),
        Case::new("groups: under their own deadlines", 1..=2, |group| {
            let short = group.with_deadline(std::time::Duration::from_secs(7));
            assert_eq!(
                short
                    .subgroup(&[0])
                    .unwrap()
                    .map(|group| group.deadline().as_secs()),
                (group.rank() == 0).then_some(7)
            );
            assert_eq!(group.deadline(), super::DEADLINE);
        }),
    ]
}

/// Returns the sum of the global ranks of a group, computed by a collective of that group.
fn sum_of_ranks(group: &ProcessGroup, len: usize) -> usize {
    let own = group.global_ranks()[group.rank()] as i64;
    let mut buffer = vec![own; len];
    group.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
    assert!(buffer.iter().all(|&sum| sum == buffer[0]));
    buffer[0] as usize
}

fn of_some_ranks(group: &ProcessGroup) {
    let (rank, world_size) = (group.rank(), group.world_size());
    let mut kept = Vec::new();
    for members in 1..1usize << world_size {
        let members: Vec<usize> = (0..world_size)
            .filter(|rank| members >> rank & 1 == 1)
            .collect();
        let asked: Vec<usize> = members.iter().rev().copied().collect();
        let Some(sub) = group.subgroup(&asked).unwrap() else {
            assert!(!members.contains(&rank));
            continue;
        };
        assert_eq!(sub.global_ranks(), members);
        assert_eq!(members[sub.rank()], rank);
        assert_eq!(sub.world_size(), members.len());
        assert_eq!(sum_of_ranks(&sub, 5000), members.iter().sum());
        kept.push((sub, members));
    }
    // They stay usable side by side, and have sub-groups of their own.
    for (sub, members) in kept {
        assert_eq!(sum_of_ranks(&sub, 3), members.iter().sum());
        let last = sub.subgroup(&[sub.world_size() - 1]).unwrap();
        assert_eq!(last.is_some(), members.last() == Some(&rank));
        if let Some(last) = last {
            assert_eq!(last.global_ranks(), [rank]);
            assert_eq!(sum_of_ranks(&last, 2000), rank);
        }
    }
    group.barrier().unwrap();
}

fn of_a_mesh(group: &ProcessGroup) {
    let mesh = DeviceMesh::new(&[2, 2], &["replicate", "shard"], 4).unwrap();
    let rank = group.rank();
    let replicate = group.mesh_group(&mesh, 0).unwrap();
    let shard = group.mesh_group(&mesh, 1).unwrap();
    assert_eq!(replicate.global_ranks(), [rank % 2, rank % 2 + 2]);
    assert_eq!(shard.global_ranks(), [rank / 2 * 2, rank / 2 * 2 + 1]);
    for len in [1, 9000] {
        assert_eq!(sum_of_ranks(&replicate, len), rank % 2 * 2 + 2);
        assert_eq!(sum_of_ranks(&shard, len), rank / 2 * 4 + 1);
    }
    let line = DeviceMesh::new(&[4], &["shard"], 4).unwrap();
    assert_eq!(
        group.mesh_group(&line, 0).unwrap().global_ranks(),
        [0, 1, 2, 3]
    );
}

/// Uses two groups of the same ranks from two threads of each rank, each in its own order.
fn at_the_same_time(group: &ProcessGroup) {
    let other = super::expendable(group);
    let expected = (0..group.world_size()).sum();
    let work = |group: &ProcessGroup| {
        for turn in 0..200 {
            assert_eq!(sum_of_ranks(group, [1, 3000, 20_000][turn % 3]), expected);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| work(&other));
        work(group);
    });
}
