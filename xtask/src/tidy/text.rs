//! The rules of single files: no paths of one machine, not too long, `unsafe` only where listed,
//! plain first sentences, comments no wider than the code.

/// The most lines that a file may have.
const MAX_LINES: usize = 1000;

/// The only files with `unsafe` in them.
const UNSAFE: &[&str] = &[
    // The calls of functions that are compiled for AVX2 and AVX-512.
    "crates/fsdp-digest/src/blocks.rs",
    // A rank lends a slice to other threads for the duration of a round.
    "crates/fsdp-comm/src/local/mod.rs",
    "crates/fsdp-comm/src/local/slot.rs",
    // Processes of one host lend slices to each other through a shared memory segment.
    "crates/fsdp-comm/src/tcp/mod.rs",
    "crates/fsdp-comm/src/tcp/segment.rs",
    // MPI's own calls.
    "crates/fsdp-comm/src/mpi/library.rs",
    "crates/fsdp-comm/src/mpi/mod.rs",
    // NCCL's own calls.
    "crates/fsdp-comm/src/nccl/library.rs",
    "crates/fsdp-comm/src/nccl/mod.rs",
    // Bytes of GPU memory, and pinned memory.
    "crates/fsdp-flat/src/storage/mod.rs",
    "crates/fsdp-flat/src/storage/copies.rs",
    "crates/fsdp-flat/src/storage/gpu_buffer.rs",
    "crates/fsdp-flat/src/storage/cuda.rs",
    "crates/fsdp-flat/src/storage/pinned.rs",
    "crates/fsdp-flat/src/storage/staging.rs",
    "crates/fsdp-flat/src/storage/uploads.rs",
    // Stores that go around the caches.
    "crates/fsdp-flat/src/non_temporal.rs",
    // Memory that threads set part by part, and matrix products into memory that is not set before.
    "crates/fsdp-ops/src/parts.rs",
    "crates/fsdp-ops/src/product.rs",
    // Launches of kernels: on GPUs, and in tests on the CPU.
    "crates/fsdp-ops/src/kernels/cuda.rs",
    "crates/fsdp-ops/src/kernels/host.rs",
    // A variable of the command's own process, which candle reads.
    "crates/fsdp-cli/src/lib.rs",
    // Code that runs between fork and exec, so that no process of a launch is left behind.
    "crates/fsdp-cli/src/launch/mod.rs",
    "crates/fsdp-cli/src/launch/parent.rs",
    // Memory that a Python object lends.
    "crates/fsdp-python/src/memory.rs",
    // The functions of C that stand in for those of NVIDIA's libraries, and the memory of a GPU
    // that is none.
    "xtask/cuda-stand-in/src/blas.rs",
    "xtask/cuda-stand-in/src/counts.rs",
    "xtask/cuda-stand-in/src/driver.rs",
    "xtask/cuda-stand-in/src/kernels/arguments.rs",
    "xtask/cuda-stand-in/src/libraries.rs",
    "xtask/cuda-stand-in/src/memory.rs",
    "xtask/cuda-stand-in/src/modules.rs",
    "xtask/cuda-stand-in/src/nccl/mod.rs",
    "xtask/cuda-stand-in/src/random.rs",
    // Tests on GPUs: streams, and the counts of the stand-in.
    "crates/fsdp-checkpoint/tests/gpu/counts.rs",
    "crates/fsdp-comm/tests/nccl.rs",
    "crates/fsdp-comm/tests/stand_in/mod.rs",
    // Global allocators that count.
    "crates/fsdp-state/tests/memory.rs",
    "tests/src/counting_allocator.rs",
];

/// The words that no doc comment starts with: a sentence that does is a riddle until its end.
const FIRST_WORDS: [&str; 7] = ["As", "Of", "That", "Those", "What", "Whether", "Who"];

/// The most characters of a line of a comment. It is the width of code in rustfmt.toml; rustfmt
/// does not wrap comments.
const MAX_COMMENT_WIDTH: usize = 100;

/// Lists the rules that one text file breaks.
pub(super) fn check(name: &str, text: &str) -> Vec<String> {
    let mut breaches = Vec::new();
    // Written in halves, so that this file does not break its own rule.
    for machine in [
        concat!("/", "work/"),
        concat!("/", "root/"),
        concat!("/", "home/"),
        concat!("/", "tmp/"),
    ] {
        for (number, line) in text
            .lines()
            .enumerate()
            .filter(|(_, line)| line.contains(machine))
        {
            breaches.push(format!(
                "{name}:{}: a path of one machine: {}",
                number + 1,
                line.trim()
            ));
        }
    }
    if !name.ends_with(".rs") {
        return breaches;
    }
    let lines = text.lines().count();
    if lines > MAX_LINES {
        breaches.push(format!(
            "{name}: {lines} lines, more than {MAX_LINES}: split it by purpose"
        ));
    }
    if !text.starts_with("//!") {
        breaches.push(format!(
            "{name}: its first line should say what it is for (`//! ...`)"
        ));
    }
    for (number, word) in unclear_doc_starts(text) {
        breaches.push(format!(
            "{name}:{number}: a doc comment should not start with \"{word}\""
        ));
    }
    for number in wide_comments(text) {
        breaches.push(format!(
            "{name}:{number}: a comment wider than {MAX_COMMENT_WIDTH} characters"
        ));
    }
    if !UNSAFE.contains(&name) {
        for (number, line) in text.lines().enumerate() {
            let code = line.trim_start();
            let keyword = [
                concat!("unsafe", " {"),
                concat!("unsafe", " fn"),
                concat!("unsafe", " impl"),
            ];
            let opens = code.contains(concat!("(unsafe", "_code"));
            if !code.starts_with("//")
                && (opens || keyword.iter().any(|keyword| code.contains(keyword)))
            {
                breaches.push(format!(
                    "{name}:{}: `unsafe` outside the modules that xtask lists",
                    number + 1
                ));
            }
        }
    }
    breaches
}

/// Lists the doc comments that start with one of [`FIRST_WORDS`], as pairs of a line's number and
/// that word.
fn unclear_doc_starts(text: &str) -> Vec<(usize, &'static str)> {
    let mut found = Vec::new();
    let mut before = "";
    for (number, line) in text.lines().enumerate() {
        let marker = marker(line.trim_start());
        if !marker.is_empty() && marker != before {
            let first = line.trim_start().trim_start_matches(marker).trim_start();
            let end = first
                .find(|c: char| !c.is_alphanumeric())
                .unwrap_or(first.len());
            if let Some(word) = FIRST_WORDS.iter().find(|word| ***word == first[..end]) {
                found.push((number + 1, *word));
            }
        }
        before = marker;
    }
    found
}

/// Lists the lines of comments that are too wide. Rows of tables and samples of code cannot be
/// broken, so they may be.
fn wide_comments(text: &str) -> Vec<usize> {
    let mut found = Vec::new();
    let mut is_sample = false;
    for (number, line) in text.lines().enumerate() {
        let Some(comment) = line.trim_start().strip_prefix("//") else {
            is_sample = false;
            continue;
        };
        let comment = comment.trim_start_matches(['/', '!']).trim_start();
        if comment.starts_with("```") {
            is_sample = !is_sample;
        }
        if !is_sample && !comment.starts_with('|') && line.chars().count() > MAX_COMMENT_WIDTH {
            found.push(number + 1);
        }
    }
    found
}

/// Returns the characters that make a line part of a doc comment; empty if it is not part of one.
fn marker(line: &str) -> &str {
    match line.get(..3) {
        Some("///") if !line.starts_with("////") => "///",
        Some("//!") => "//!",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_break_a_rule_are_found() {
        assert!(check("a.rs", "//! About.\n").is_empty());
        assert_eq!(check("a.rs", "use b;\n").len(), 1);
        assert_eq!(
            check("a.rs", &format!("//! About.\n{}", "\n".repeat(MAX_LINES))).len(),
            1
        );
        let code = concat!("//! About.\nlet x = unsafe", " { y };\n");
        assert_eq!(check("a.rs", code).len(), 1);
        assert!(check(UNSAFE[0], code).is_empty());
        assert_eq!(check("a.md", concat!("see /", "tmp/x")).len(), 1);
    }

    #[test]
    fn comments_that_are_too_wide_are_found() {
        let (wide, narrow) = (
            "é".repeat(MAX_COMMENT_WIDTH),
            "é".repeat(MAX_COMMENT_WIDTH - 4),
        );
        let lines = [
            format!("//! {narrow}"),
            format!("//! {wide}"),
            format!("//! | {wide} |"),
            format!("//! ```\n//! {wide}\n//! ```"),
            format!("let code = \"{wide}\";"),
            format!("    // {wide}"),
        ];
        assert_eq!(wide_comments(&lines.join("\n")), [2, 8]);
    }

    #[test]
    fn doc_comments_that_start_with_a_riddle_are_found() {
        let text = [
            "//! What this is.",
            "//! Of the rest only the first line counts.",
            "",
            "/// Returns `true`.",
            "/// Whether it is the second line does not matter.",
            "fn f() {",
            "    // As a plain comment it may.",
            "    /// As a doc comment it may not.",
            "    let text = \"Those\";",
            "}",
        ];
        assert_eq!(
            unclear_doc_starts(&text.join("\n")),
            [(1, "What"), (8, "As")]
        );
        let breaches = check(
            "crates/x/src/a.rs",
            "//! About.\n\n/// Whether: no.\nfn f() {}\n",
        );
        assert_eq!(breaches.len(), 1, "{breaches:?}");
    }
}
