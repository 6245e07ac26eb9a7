//! The names that trainers give to the parts of a checkpoint.

use std::collections::BTreeSet;

use crate::limits::MAX_LISTED_FILES;

/// A part of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FolderPart {
    /// The file or directory; empty for the folder itself.
    pub(super) path: String,
    /// The keys before those of the part.
    pub(super) prefix: Vec<String>,
    /// The way to read it.
    pub(super) kind: PartKind,
}

/// The way to read a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PartKind {
    /// A checkpoint with a file or directory of its own.
    Own,
    /// The safetensors files of the folder.
    Safetensors,
    /// The files of torch that an index in the folder lists.
    TorchIndex,
    /// The files of ranks in the folder.
    RankFiles,
    /// A file of JSON.
    Json,
}

/// The names of HF Trainer and accelerate for parts of which there is one, and their keys.
const SINGLE: [(&str, &str); 12] = [
    ("optimizer.pt", "optimizer"),
    ("optimizer.bin", "optimizer"),
    ("scheduler.pt", "scheduler"),
    ("scheduler.bin", "scheduler"),
    ("scaler.pt", "scaler"),
    ("sampler.bin", "sampler"),
    ("dl_state_dict.bin", "dl_state_dict"),
    ("rng_state.pth", "rng_state"),
    ("trainer_state.json", "trainer_state"),
    ("pytorch_model_fsdp.bin", "model"),
    ("pytorch_model_fsdp_0", "model"),
    ("optimizer_0", "optimizer"),
];

/// The names of numbered parts: the text before the number, the extension after it, and the keys,
/// the last of which the number completes.
const NUMBERED: [(&str, &str, &[&str]); 11] = [
    ("rng_state_", ".pth", &["rng_state", "rank_"]),
    ("random_states_", ".pkl", &["random_states", "rank_"]),
    ("pytorch_model_fsdp_", "", &["model_"]),
    ("pytorch_model_fsdp_", ".bin", &["model_"]),
    ("optimizer_", "", &["optimizer_"]),
    ("optimizer_", ".bin", &["optimizer_"]),
    ("scheduler_", ".bin", &["scheduler_"]),
    ("sampler_", ".bin", &["sampler_"]),
    ("dl_state_dict_", ".bin", &["dl_state_dict_"]),
    ("custom_checkpoint_", ".pkl", &["custom_checkpoint_"]),
    ("model_", ".safetensors", &["model_"]),
];

/// The numbered parts of which there is every one from the first to the last: the text before the
/// number, the extension after it, and the name of the first. It is empty for parts of ranks, since
/// a folder on one of several hosts has only those of its own ranks. Data loaders are not among
/// these parts, because some of several may have no state.
const SERIES: [(&str, &str, &str); 8] = [
    ("rng_state_", ".pth", ""),
    ("random_states_", ".pkl", ""),
    ("custom_checkpoint_", ".pkl", "custom_checkpoint_0.pkl"),
    ("pytorch_model_fsdp_", "", "pytorch_model_fsdp_0"),
    ("pytorch_model_fsdp_", ".bin", "pytorch_model_fsdp.bin"),
    ("optimizer_", "", "optimizer_0"),
    ("optimizer_", ".bin", "optimizer.bin"),
    ("scheduler_", ".bin", "scheduler.bin"),
];

/// The files by which the model of a folder is found, and the way to read it, the best one first.
const MODELS: [(&str, PartKind); 5] = [
    ("model.safetensors.index.json", PartKind::Safetensors),
    ("model.safetensors", PartKind::Own),
    ("pytorch_model.bin.index.json", PartKind::TorchIndex),
    ("pytorch_model.bin", PartKind::Own),
    ("adapter_model.safetensors", PartKind::Own),
];

/// Returns the path of keys below which a part with this file name lies, or `None` if the name is
/// not that of a part.
fn item_keys(name: &str) -> Option<Vec<String>> {
    if let Some((_, key)) = SINGLE.iter().find(|(single, _)| *single == name) {
        return Some(vec![(*key).to_owned()]);
    }
    for (start, end, numbered_keys) in NUMBERED {
        if let Some(digits) = digits_between(name, start, end) {
            let mut keys: Vec<String> = numbered_keys.iter().map(|&key| key.to_owned()).collect();
            keys.last_mut()?.push_str(digits);
            return Some(keys);
        }
    }
    None
}

/// Returns the digits between two texts that are all else of a name; `None` if it is another name,
/// or has too many digits.
fn digits_between<'n>(name: &'n str, start: &str, end: &str) -> Option<&'n str> {
    let digits = name.strip_prefix(start)?.strip_suffix(end)?;
    let is_number =
        (1..8).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_digit());
    is_number.then_some(digits)
}

/// Returns the parts among the names in a folder, the model first; none if it has nothing beside a
/// model.
pub(super) fn find_parts(names: &[String], has_rank_files: bool) -> Vec<FolderPart> {
    let mut parts = Vec::new();
    for name in names {
        let Some(prefix) = item_keys(name) else {
            continue;
        };
        let kind = if name.ends_with(".json") {
            PartKind::Json
        } else {
            PartKind::Own
        };
        parts.push(FolderPart {
            path: name.clone(),
            prefix,
            kind,
        });
    }
    // The second models of accelerate stand beside its first one. By themselves such files are
    // shards of one model.
    if !names.iter().any(|name| name == "model.safetensors") {
        parts.retain(|part| !part.path.ends_with(".safetensors"));
    }
    if parts.is_empty() {
        return parts;
    }
    let has_model = parts.iter().any(|part| part.prefix[0] == "model");
    let mut model = None;
    if has_rank_files {
        model = Some(("", PartKind::RankFiles));
    } else if !has_model {
        model = MODELS
            .into_iter()
            .find(|(file, _)| names.iter().any(|name| name == file));
    }
    if let Some((file, kind)) = model {
        // A model in several files lies in the folder itself.
        let path = if kind == PartKind::Own { file } else { "" };
        parts.push(FolderPart {
            path: path.to_owned(),
            prefix: vec!["model".to_owned()],
            kind,
        });
    }
    // A trainer's folder has a model, or a file that only a trainer writes. A user's own files may
    // have names like the other parts, but they do not make a trainer's folder: the rest of that
    // folder would be left out.
    let is_of_trainer = parts.iter().any(|part| {
        part.prefix[0].starts_with("model")
            || part.kind == PartKind::Json
            || part.prefix[0] == "random_states"
    });
    if !is_of_trainer {
        return Vec::new();
    }
    // A model, its optimizer, and all else.
    parts.sort_by_key(|part| match part.prefix[0].as_str() {
        "model" => 0,
        "optimizer" => 1,
        _ => 2,
    });
    parts
}

/// Returns the names of parts that a folder with these names lacks: those of the numbers between
/// the first and the largest one of a series, or as many of them as an error names.
pub(super) fn missing_parts(names: &[String]) -> Vec<String> {
    let mut missing = Vec::new();
    for (start, end, first) in SERIES {
        let mut numbers: BTreeSet<usize> = names
            .iter()
            .filter_map(|name| digits_between(name, start, end)?.parse().ok())
            .collect();
        if names.iter().any(|name| name == first) {
            numbers.insert(0);
        }
        let largest = numbers.last().copied().unwrap_or(0);
        let smallest = match first {
            "" => numbers.first().copied().unwrap_or(0),
            _ => 0,
        };
        let gaps = (smallest..largest).filter(|number| !numbers.contains(number));
        missing.extend(gaps.take(MAX_LISTED_FILES).map(|number| match number {
            0 => first.to_owned(),
            number => format!("{start}{number}{end}"),
        }));
    }
    missing
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the parts among these names, each as its path and its keys.
    fn described_parts(names: &[&str]) -> Vec<String> {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        find_parts(&names, false)
            .iter()
            .map(|part| format!("{}={}", part.path, part.prefix.join(".")))
            .collect()
    }

    #[test]
    fn parts_of_trainers_are_known_and_models_alone_are_not_folders() {
        assert_eq!(
            described_parts(&[
                "config.json",
                "model.safetensors",
                "optimizer.pt",
                "rng_state_1.pth",
                "training_args.bin"
            ]),
            [
                "model.safetensors=model",
                "optimizer.pt=optimizer",
                "rng_state_1.pth=rng_state.rank_1"
            ]
        );
        assert_eq!(
            described_parts(&[
                "optimizer_0",
                "optimizer_1",
                "pytorch_model_fsdp_0",
                "random_states_0.pkl",
                "scheduler.bin"
            ]),
            [
                "pytorch_model_fsdp_0=model",
                "optimizer_0=optimizer",
                "optimizer_1=optimizer_1",
                "random_states_0.pkl=random_states.rank_0",
                "scheduler.bin=scheduler"
            ]
        );
        assert_eq!(
            described_parts(&["config.json", "model.safetensors", "tokenizer.json"]),
            [""; 0]
        );
        assert_eq!(
            described_parts(&["model_0.safetensors", "model_1.safetensors"]),
            [""; 0]
        );
        assert_eq!(
            described_parts(&["model.safetensors", "model_1.safetensors"]),
            ["model.safetensors=model", "model_1.safetensors=model_1"]
        );
        assert_eq!(
            described_parts(&["model.pt", "optimizer.pt", "scheduler.pt"]),
            [""; 0]
        );
        assert_eq!(
            described_parts(&["optimizer.bin", "random_states_0.pkl"]),
            [
                "optimizer.bin=optimizer",
                "random_states_0.pkl=random_states.rank_0"
            ]
        );
        assert_eq!(
            described_parts(&["rng_state_x.pth", "rng_state_.pth", "optimizer_999999999"]),
            [""; 0]
        );
    }

    #[test]
    fn gaps_in_the_numbers_of_parts_are_found() {
        let cases: [(&[&str], &[&str]); 8] = [
            (&["random_states_0.pkl", "random_states_1.pkl"], &[]),
            // The ranks of another host are not here.
            (&["random_states_4.pkl", "random_states_5.pkl"], &[]),
            (
                &["rng_state_0.pth", "rng_state_3.pth"],
                &["rng_state_1.pth", "rng_state_2.pth"],
            ),
            // The number of the first is left out in some names.
            (&["optimizer.bin", "optimizer_1.bin"], &[]),
            (&["scheduler_1.bin"], &["scheduler.bin"]),
            (
                &["optimizer_0", "optimizer_2", "pytorch_model_fsdp_1"],
                &["pytorch_model_fsdp_0", "optimizer_1"],
            ),
            // A data loader may have no state.
            (&["sampler_1.bin", "dl_state_dict_2.bin"], &[]),
            (&["model.safetensors", "rng_state.pth"], &[]),
        ];
        for (names, missing) in cases {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            assert_eq!(missing_parts(&names), missing, "{names:?}");
        }
        let names = ["custom_checkpoint_9999999.pkl".to_owned()];
        assert_eq!(missing_parts(&names).len(), MAX_LISTED_FILES);
    }
}
