//! The names of the files that torch's `HuggingFaceStorageWriter(save_distributed=True)` writes:
//! `shard-00002-model-00001-of-00003.safetensors` is the first of three files of the second rank.

use std::collections::BTreeSet;

use crate::formats::weights::SHARD_PREFIX;

/// The file of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ShardFile {
    /// The rank, counted from 1.
    rank: usize,
    /// The number of the file among those of the model, counted from 1.
    number: usize,
    /// The number of files of the model.
    count: usize,
}

impl ShardFile {
    /// Reads a name; returns `None` for other names.
    fn parse(name: &str) -> Option<Self> {
        let (rank, rest) = name.strip_prefix(SHARD_PREFIX)?.split_once("-model-")?;
        let (number, count) = rest.strip_suffix(".safetensors")?.split_once("-of-")?;
        let file = ShardFile {
            rank: rank.parse().ok()?,
            number: number.parse().ok()?,
            count: count.parse().ok()?,
        };
        // Other texts of the same numbers are other names.
        let is_sane = file.rank > 0 && (1..=file.count).contains(&file.number);
        (is_sane && file.name() == name).then_some(file)
    }

    /// Returns the name of the file.
    fn name(self) -> String {
        let number = format!("{:05}", self.number);
        file_name(&format!("{:05}", self.rank), &number, self.count)
    }
}

/// Returns the name of a file. A `*` stands for a number that is not known.
fn file_name(rank: &str, number: &str, count: usize) -> String {
    format!("{SHARD_PREFIX}{rank}-model-{number}-of-{count:05}.safetensors")
}

/// The files of all ranks.
pub(super) struct ShardFiles(BTreeSet<ShardFile>);

impl ShardFiles {
    /// Finds the files of ranks among these names.
    pub(super) fn among(names: &[String]) -> Self {
        let files = names.iter().filter_map(|name| ShardFile::parse(name));
        ShardFiles(files.collect())
    }

    /// Returns `true` if there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the names of files that the others tell of: of ranks before the last one, and of
    /// numbers of which no rank has a file. This is lazy, because the numbers may be absurdly
    /// large.
    pub(super) fn missing(&self) -> impl Iterator<Item = String> {
        let last_rank = self.0.iter().map(|file| file.rank).max().unwrap_or(0);
        let count = self.0.iter().map(|file| file.count).max().unwrap_or(0);
        let ranks: BTreeSet<usize> = self.0.iter().map(|file| file.rank).collect();
        let numbers: BTreeSet<usize> = self.0.iter().map(|file| file.number).collect();
        let of_ranks = (1..last_rank)
            .filter(move |rank| !ranks.contains(rank))
            .map(move |rank| {
                let number = if count == 1 { "00001" } else { "*" };
                file_name(&format!("{rank:05}"), number, count)
            });
        let of_numbers = (1..=count)
            .filter(move |number| !numbers.contains(number))
            .map(move |number| file_name("*", &format!("{number:05}"), count));
        of_ranks.chain(of_numbers)
    }

    /// Returns the names of files with the same number as the file `name` that other ranks have
    /// not: one of them may hold what is missing of a tensor in that file.
    pub(super) fn missing_beside(&self, name: &str) -> Vec<String> {
        let Some(file) = ShardFile::parse(name) else {
            return Vec::new();
        };
        let ranks: BTreeSet<usize> = self.0.iter().map(|file| file.rank).collect();
        ranks
            .into_iter()
            .map(|rank| ShardFile { rank, ..file })
            .filter(|other| !self.0.contains(other))
            .map(ShardFile::name)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the names of the files that are missing among files of these ranks, numbers and
    /// counts.
    fn missing(files: &[(usize, usize, usize)]) -> Vec<String> {
        let names = files.iter().map(|&(rank, number, count)| {
            let file = ShardFile {
                rank,
                number,
                count,
            };
            file.name()
        });
        let names: Vec<String> = names.collect();
        ShardFiles::among(&names).missing().take(3).collect()
    }

    #[test]
    fn numbers_tell_which_files_are_missing() {
        assert_eq!(missing(&[(1, 1, 1), (2, 1, 1)]), [""; 0]);
        assert_eq!(
            missing(&[(1, 1, 1), (3, 1, 1)]),
            ["shard-00002-model-00001-of-00001.safetensors"]
        );
        assert_eq!(
            missing(&[(2, 1, 2), (2, 2, 2)]),
            ["shard-00001-model-*-of-00002.safetensors"]
        );
        assert_eq!(
            missing(&[(1, 1, 3), (2, 3, 3)]),
            ["shard-*-model-00002-of-00003.safetensors"]
        );
        assert_eq!(missing(&[(usize::MAX, 1, usize::MAX)]).len(), 3);
    }

    #[test]
    fn other_names_are_no_shards() {
        for name in [
            "model-00001-of-00002.safetensors",
            "shard-1-model-00001-of-00001.safetensors",
            "shard-00000-model-00001-of-00001.safetensors",
            "shard-00001-model-00002-of-00001.safetensors",
            "shard-00001-of-00002.safetensors",
            "shard-00001-model-00001-of-00001.bin",
        ] {
            assert_eq!(ShardFile::parse(name), None, "{name}");
        }
    }
}
