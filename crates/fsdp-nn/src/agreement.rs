//! The agreement of all ranks on the model that they have built.

use fsdp_comm::{CommError, ProcessGroup};

use crate::{NnError, Result};

/// The operation that makes a model.
pub(crate) const NEW: &str = "FullyShardedDataParallel::new";

/// Turns one rank's error into an error on every rank, and checks that all ranks describe their
/// models by the same lines. Collectives: one agreement; if the lines differ, a binary search for
/// the first difference, with one all-gather of a number for each of its steps, and one all-gather
/// of a line.
pub(crate) fn agree_on_model<T>(
    group: &ProcessGroup,
    operation: &str,
    built: Result<T>,
    describe: impl FnOnce(&T) -> Vec<String>,
) -> Result<T> {
    let lines = built.as_ref().map_or_else(|_| Vec::new(), describe);
    match group.agree_on(operation, hash(&lines), built.as_ref().map(|_| ())) {
        // This rank's own error keeps its type.
        Err(CommError::RankFailed { .. }) if built.is_err() => built,
        Err(CommError::SchemaMismatch { .. }) => Err(first_difference(group, &lines)?),
        Err(error) => Err(error.into()),
        Ok(()) => built,
    }
}

/// Returns a hash of lines.
fn hash(lines: &[String]) -> u64 {
    twox_hash::XxHash3_64::oneshot(lines.join("\n").as_bytes())
}

/// Finds the first line that is not the same on all ranks, and returns it as an error. At least one
/// line must differ. Collectives: all-gathers, of hashes and of one line.
fn first_difference(group: &ProcessGroup, lines: &[String]) -> Result<NnError> {
    // Search by halves. The first `same` lines are the same on all ranks, and the first `different`
    // lines are not. Some rank may have fewer lines than that, and then lacks the last of them. All
    // ranks see the same hashes, so they take the same turns.
    let longest = group
        .all_gather_object(&lines.len())?
        .into_iter()
        .max()
        .unwrap_or(0);
    let (mut same, mut different) = (0, longest);
    while same + 1 < different {
        let middle = same.midpoint(different);
        let hashes = group.all_gather_object(&hash(&lines[..middle.min(lines.len())]))?;
        if hashes.iter().all(|hash| *hash == hashes[0]) {
            same = middle;
        } else {
            different = middle;
        }
    }
    // Show each other the line that differs, and list which ranks have which.
    let found = group.all_gather_object(&lines.get(same).cloned())?;
    let mut differences: Vec<(Option<String>, Vec<usize>)> = Vec::new();
    for (line, &rank) in found.into_iter().zip(group.global_ranks()) {
        match differences.iter_mut().find(|(other, _)| *other == line) {
            Some((_, ranks)) => ranks.push(rank),
            None => differences.push((line, vec![rank])),
        }
    }
    let differences = differences.into_iter().map(|(line, ranks)| {
        format!(
            "{} {}",
            on_ranks(&ranks),
            line.as_deref().unwrap_or("nothing more")
        )
    });
    Ok(NnError::DifferentModels {
        differences: differences.collect(),
    })
}

/// Returns the subject and the verb of a sentence about ranks: `rank 3 has`.
fn on_ranks(ranks: &[usize]) -> String {
    match ranks {
        [rank] => format!("rank {rank} has"),
        ranks => format!("ranks {ranks:?} have"),
    }
}
