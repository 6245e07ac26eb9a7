//! The names of files that one rank has written.

use crate::limits::MAX_RANKS;

/// The format of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum FileKind {
    /// `torch.save`
    Torch,
    /// Safetensors: tensors only.
    Safetensors,
    /// JSON: values only.
    Json,
    /// Bytes of the user's own.
    Raw,
}

impl FileKind {
    /// Returns the format of a file with this name.
    pub(super) fn of_name(name: &str) -> Self {
        match name.rsplit_once('.').map(|(_, extension)| extension) {
            Some("pt" | "pth" | "ckpt") => FileKind::Torch,
            Some("safetensors") => FileKind::Safetensors,
            Some("json") => FileKind::Json,
            _ => FileKind::Raw,
        }
    }
}

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
    /// The format.
    pub(super) kind: FileKind,
    /// The name up to the digits of the rank.
    name_start: String,
    /// The name behind these digits.
    name_end: String,
}

impl RankFile {
    /// Reads `ITEM_world_size_N_rank_R.pt`, or `ITEM_rankR.bin`; `None` for any other name.
    pub(super) fn parse(name: &str) -> Option<Self> {
        let (stem, extension) = [".pt", ".bin", ".pth"]
            .iter()
            .find_map(|extension| Some((name.strip_suffix(extension)?, extension)))?;
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
            kind: FileKind::Torch,
            name_start: name_start.to_owned(),
            name_end: (*extension).to_owned(),
        }
        .if_sane()
    }

    /// Makes the file of this rank at a path that is not its rank's usual one: nothing is known of
    /// those of other ranks.
    pub(super) fn at(path: &str, item: &str, rank: usize, kind: FileKind) -> Self {
        RankFile {
            name: path.to_owned(),
            item: item.to_owned(),
            rank,
            world_size: None,
            kind,
            name_start: path.to_owned(),
            name_end: String::new(),
        }
    }

    /// Makes the file of a rank that a list tells: its path may say something else, or nothing.
    pub(super) fn listed(path: &str, item: &str, rank: usize, kind: FileKind) -> Self {
        let file = Self::parse_path(path).filter(|file| file.rank == rank);
        RankFile {
            item: item.to_owned(),
            kind,
            ..file.unwrap_or_else(|| Self::at(path, item, rank, kind))
        }
    }

    /// Reads a path of which the name, or the folder next to it, ends with the number of a rank:
    /// `ITEM_R.pt`, `ITEM-rank-R.json`, `rank_R/ITEM.safetensors`, `ITEM/R.bin`. `None` for any
    /// other path.
    pub(super) fn parse_path(path: &str) -> Option<Self> {
        let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
        let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
        let folder = folders.rsplit('/').next().unwrap_or_default();
        let stem_end = path.len() - name.len() + stem.len();
        let rank_of_folder = split_rank(folder, false);
        let (item, rank, digits_end) = match (split_rank(stem, true), rank_of_folder) {
            (Some(("", rank)), None) => (folder, rank, stem_end),
            (Some(("", _)), Some(_)) => return None,
            (Some((item, rank)), _) => (item, rank, stem_end),
            (None, Some(("", rank))) => (stem, rank, folders.len()),
            (None, _) => return None,
        };
        let before_digits = path[..digits_end].trim_end_matches(is_digit);
        RankFile {
            name: path.to_owned(),
            item: item.to_owned(),
            rank,
            world_size: None,
            kind: FileKind::of_name(name),
            name_start: before_digits.to_owned(),
            name_end: path[digits_end..].to_owned(),
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

    /// Returns the item's name with those of its folders and its extension, without the rank.
    pub(super) fn long_item(&self) -> String {
        let text = format!("{}{}", self.name_start, self.name_end).replace('/', ".");
        let parts = text
            .split('.')
            .map(|part| part.trim_end_matches(SEPARATORS));
        let parts: Vec<&str> = parts.filter(|part| !part.is_empty()).collect();
        parts.join(".")
    }

    /// Returns the name of another rank's file.
    pub(super) fn name_of_rank(&self, rank: usize) -> String {
        format!("{}{rank}{}", self.name_start, self.name_end)
    }
}

/// Splits a text into what is before the digits at its end, and their number; `None` if it ends
/// with none, or they are too many.
fn split_number(text: &str) -> Option<(&str, usize)> {
    let before = text.trim_end_matches(is_digit);
    let number = text[before.len()..].parse().ok()?;
    Some((before, number))
}

/// The characters between a word and the number behind it.
const SEPARATORS: [char; 3] = ['_', '-', '.'];

fn is_digit(character: char) -> bool {
    character.is_ascii_digit()
}

/// Splits a name into what is before the number of a rank at its end, and that number; `None` if it
/// does not end with one. The number follows the word `rank`, nothing, or, if `is_any` is `true`,
/// any word and a separator.
fn split_rank(name: &str, is_any: bool) -> Option<(&str, usize)> {
    let (before, rank) = split_number(name)?;
    let word = before.trim_end_matches(SEPARATORS);
    if let Some(item) = word.strip_suffix("rank") {
        return Some((item.trim_end_matches(SEPARATORS), rank));
    }
    (word.is_empty() || is_any && word.len() < before.len()).then_some((word, rank))
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

    #[test]
    fn paths_tell_the_rank_and_the_item() {
        for (path, item, rank, of_rank_7) in [
            ("model_0.pt", "model", 0, "model_7.pt"),
            ("model_rank_3.pt", "model", 3, "model_rank_7.pt"),
            ("misc-rank2.json", "misc", 2, "misc-rank7.json"),
            ("rank_1/trainer.json", "trainer", 1, "rank_7/trainer.json"),
            ("a/12/x.bin", "x", 12, "a/7/x.bin"),
            (
                "weights/part-10.safetensors",
                "part",
                10,
                "weights/part-7.safetensors",
            ),
            ("model/rank_2.pt", "model", 2, "model/rank_7.pt"),
            ("optim/0.pt", "optim", 0, "optim/7.pt"),
        ] {
            let file = RankFile::parse_path(path).unwrap();
            assert_eq!((file.item.as_str(), file.rank), (item, rank), "{path}");
            assert_eq!(file.name_of_rank(7), of_rank_7, "{path}");
            assert_eq!(file.name_of_rank(rank), path);
        }
        for path in [
            "model.pt",
            "llama2.json",
            "v2/model.pt",
            "0.pt",
            "rank_0.pt",
            "._model_0.pt",
            "rank_0/0.pt",
            "mp_rank_00/model_optim_rng.pt",
        ] {
            assert_eq!(RankFile::parse_path(path), None, "{path}");
        }
    }
}
