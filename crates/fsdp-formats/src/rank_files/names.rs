//! The names of files that one rank has written.

use crate::limits::MAX_RANKS;

/// The item that is a state of its own on each rank.
pub(super) const EXTRA_STATE: &str = "extra_state";

/// A file that one rank has written, by its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RankFile {
    /// The whole name.
    pub(super) name: String,
    /// The state that it is a part of: `model`, `optim`.
    pub(super) item: String,
    /// The rank.
    pub(super) rank: usize,
    /// The number of ranks, if the name tells it.
    pub(super) world_size: Option<usize>,
    /// The name up to the digits of the rank.
    name_start: String,
    /// The extension, with its dot.
    extension: &'static str,
}

impl RankFile {
    /// Reads `ITEM_world_size_N_rank_R.pt`, or `ITEM_rankR.bin`; `None` for any other name.
    pub(super) fn parse(name: &str) -> Option<Self> {
        let (stem, extension) = [".pt", ".bin", ".pth"]
            .iter()
            .find_map(|extension| Some((name.strip_suffix(extension)?, *extension)))?;
        let (name_start, rank) = split_number(stem)?;
        let item_and_count = name_start
            .strip_suffix("_rank_")
            .or_else(|| name_start.strip_suffix("_rank"))?;
        let (item, world_size) = match split_number(item_and_count) {
            Some((start, count)) => match start.strip_suffix("_world_size_") {
                Some(item) => (item, Some(count)),
                None => (item_and_count, None),
            },
            None => (item_and_count, None),
        };
        // accelerate's names of the first model and the first optimizer.
        let item = match item {
            "pytorch_model_fsdp" | "pytorch_model_fsdp_0" => "model",
            "optimizer_0" => "optimizer",
            item => item,
        };
        RankFile {
            name: name.to_owned(),
            item: item.to_owned(),
            rank,
            world_size,
            name_start: name_start.to_owned(),
            extension,
        }
        .if_sane()
    }

    /// Reads `ITEM_R.pt`; `None` for any other name.
    pub(super) fn parse_bare(name: &str) -> Option<Self> {
        let (name_start, rank) = split_number(name.strip_suffix(".pt")?)?;
        RankFile {
            name: name.to_owned(),
            item: name_start.strip_suffix('_')?.to_owned(),
            rank,
            world_size: None,
            name_start: name_start.to_owned(),
            extension: ".pt",
        }
        .if_sane()
    }

    /// Returns the file, unless its numbers are too large to be believed, or it is not the file of
    /// a state. Hidden files are somebody else's: macOS leaves one for every file on foreign disks.
    fn if_sane(self) -> Option<Self> {
        let is_sane = !self.item.is_empty()
            && !self.item.starts_with('.')
            && self.rank < MAX_RANKS
            && self.world_size.is_none_or(|count| count <= MAX_RANKS);
        is_sane.then_some(self)
    }

    /// Returns the name of another rank's file.
    pub(super) fn name_of_rank(&self, rank: usize) -> String {
        format!("{}{rank}{}", self.name_start, self.extension)
    }
}

/// Splits a text into what is before the digits at its end, and their number; `None` if it ends
/// with none, or they are too many.
fn split_number(text: &str) -> Option<(&str, usize)> {
    let before = text.trim_end_matches(|character: char| character.is_ascii_digit());
    let number = text[before.len()..].parse().ok()?;
    Some((before, number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_frameworks_are_known_and_others_are_not() {
        let file = RankFile::parse("model_world_size_4_rank_3.pt").unwrap();
        assert_eq!(
            (file.item.as_str(), file.rank, file.world_size),
            ("model", 3, Some(4))
        );
        assert_eq!(file.name_of_rank(0), "model_world_size_4_rank_0.pt");
        let file = RankFile::parse("pytorch_model_fsdp_0_rank12.bin").unwrap();
        assert_eq!(
            (file.item.as_str(), file.rank, file.world_size),
            ("model", 12, None)
        );
        assert_eq!(file.name_of_rank(1), "pytorch_model_fsdp_0_rank1.bin");
        for name in [
            "mp_rank_00_model_states.pt",
            "zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "model_rank.pt",
            "_rank_0.pt",
            "model_0.pt",
            "rank0.bin",
            "model_rank_99999999999999999999999.pt",
            "model_rank_1.safetensors",
        ] {
            assert_eq!(RankFile::parse(name), None, "{name}");
        }
    }
}
