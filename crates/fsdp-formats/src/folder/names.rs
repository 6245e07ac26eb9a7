//! The names that trainers give to the parts of a checkpoint.

/// A part of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    /// The file or directory; empty for the folder itself.
    pub(super) place: String,
    /// The keys before those of the part.
    pub(super) item: Vec<String>,
    /// The way to read it.
    pub(super) kind: Kind,
}

/// The way to read a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
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

/// The names of numbered parts: the text before the number, the extension after it, and the key
/// before the number.
const NUMBERED: [(&str, &str, &str); 9] = [
    ("pytorch_model_fsdp_", "", "model_"),
    ("pytorch_model_fsdp_", ".bin", "model_"),
    ("optimizer_", "", "optimizer_"),
    ("optimizer_", ".bin", "optimizer_"),
    ("scheduler_", ".bin", "scheduler_"),
    ("sampler_", ".bin", "sampler_"),
    ("dl_state_dict_", ".bin", "dl_state_dict_"),
    ("custom_checkpoint_", ".pkl", "custom_checkpoint_"),
    ("model_", ".safetensors", "model_"),
];

/// The names of files of ranks: the text before the rank, the extension after it, and the key.
const OF_RANKS: [(&str, &str, &str); 2] = [
    ("rng_state_", ".pth", "rng_state"),
    ("random_states_", ".pkl", "random_states"),
];

/// Returns the path of keys below which a part with this file name lies, or `None` if the name is
/// not that of a part.
fn item(name: &str) -> Option<Vec<String>> {
    if let Some((_, item)) = SINGLE.iter().find(|(single, _)| *single == name) {
        return Some(vec![(*item).to_owned()]);
    }
    let number = |start: &str, end: &str| {
        let digits = name.strip_prefix(start)?.strip_suffix(end)?;
        (!digits.is_empty()
            && digits.len() < 8
            && digits.bytes().all(|digit| digit.is_ascii_digit()))
        .then_some(digits)
    };
    for (start, end, item) in OF_RANKS {
        if let Some(rank) = number(start, end) {
            return Some(vec![item.to_owned(), format!("rank_{rank}")]);
        }
    }
    for (start, end, item) in NUMBERED {
        if let Some(digits) = number(start, end) {
            return Some(vec![format!("{item}{digits}")]);
        }
    }
    None
}

/// Finds the parts among the names in a folder, the model first; none if it has nothing beside a
/// model.
pub(super) fn parts(names: &[String], has_rank_files: bool) -> Vec<Part> {
    let mut parts = Vec::new();
    for name in names {
        let Some(item) = item(name) else { continue };
        let kind = if name.ends_with(".json") {
            Kind::Json
        } else {
            Kind::Own
        };
        parts.push(Part {
            place: name.clone(),
            item,
            kind,
        });
    }
    let has = |name: &str| names.iter().any(|other| other == name);
    // The second models of accelerate stand beside its first one. By themselves such files are
    // shards of one model.
    if !has("model.safetensors") {
        parts.retain(|part| !part.place.ends_with(".safetensors"));
    }
    if parts.is_empty() {
        return parts;
    }
    let has_model = parts.iter().any(|part| part.item[0] == "model");
    let in_place = |kind| Part {
        place: String::new(),
        item: vec!["model".to_owned()],
        kind,
    };
    let model = if has_rank_files {
        Some(in_place(Kind::RankFiles))
    } else if has_model {
        None
    } else if has("model.safetensors.index.json") {
        Some(in_place(Kind::Safetensors))
    } else if has("model.safetensors") {
        Some(Part {
            place: "model.safetensors".to_owned(),
            ..in_place(Kind::Own)
        })
    } else if has("pytorch_model.bin.index.json") {
        Some(in_place(Kind::TorchIndex))
    } else if has("pytorch_model.bin") {
        Some(Part {
            place: "pytorch_model.bin".to_owned(),
            ..in_place(Kind::Own)
        })
    } else if has("adapter_model.safetensors") {
        Some(Part {
            place: "adapter_model.safetensors".to_owned(),
            ..in_place(Kind::Own)
        })
    } else {
        None
    };
    parts.extend(model);
    // A trainer's folder has a model, or a file that only a trainer writes. A user's own files may
    // have names like the other parts, but they do not make a trainer's folder: the rest of that
    // folder would be left out.
    let is_of_trainer = |part: &Part| {
        part.item[0].starts_with("model")
            || part.kind == Kind::Json
            || part.item[0] == "random_states"
    };
    if !parts.iter().any(is_of_trainer) {
        return Vec::new();
    }
    // A model, its optimizer, and all else.
    parts.sort_by_key(|part| match part.item[0].as_str() {
        "model" => 0,
        "optimizer" => 1,
        _ => 2,
    });
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn items(names: &[&str]) -> Vec<String> {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        parts(&names, false)
            .iter()
            .map(|part| format!("{}={}", part.place, part.item.join(".")))
            .collect()
    }

    #[test]
    fn parts_of_trainers_are_known_and_models_alone_are_not_folders() {
        assert_eq!(
            items(&[
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
            items(&[
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
            items(&["config.json", "model.safetensors", "tokenizer.json"]),
            [""; 0]
        );
        assert_eq!(
            items(&["model_0.safetensors", "model_1.safetensors"]),
            [""; 0]
        );
        assert_eq!(
            items(&["model.safetensors", "model_1.safetensors"]),
            ["model.safetensors=model", "model_1.safetensors=model_1"]
        );
        assert_eq!(
            items(&["model.pt", "optimizer.pt", "scheduler.pt"]),
            [""; 0]
        );
        assert_eq!(
            items(&["optimizer.bin", "random_states_0.pkl"]),
            [
                "optimizer.bin=optimizer",
                "random_states_0.pkl=random_states.rank_0"
            ]
        );
        assert_eq!(
            items(&["rng_state_x.pth", "rng_state_.pth", "optimizer_999999999"]),
            [""; 0]
        );
    }
}
