//! Megatron-LM's `fsdp_dtensor`: DTensors of Megatron-FSDP, whose rows are cut unevenly, in a DCP
//! directory.

use fsdp_formats::checkpoint::Checkpoint as _;
use fsdp_layout::PlainValue;
use fsdp_tools::convert::{ConvertOptions, OutputFormat, Rename, View, convert};
use fsdp_tools::verify::{Level, VerifyOptions, verify};

use crate::foreign::{assert_converts, differences, fixture, opened};

#[test]
fn boxes_of_uneven_rows_make_the_tensors_that_were_cut() {
    let whole = opened(&fixture("fsdp_dtensor/whole.pt"));
    let parent = tempfile::tempdir().unwrap();
    for name in ["flat", "hybrid"] {
        let source = opened(&fixture("fsdp_dtensor").join(name));
        let report = verify(&*source, Level::Deep, VerifyOptions::default()).unwrap();
        assert!(report.is_ok(), "{name}: {:?}", report.problems);
        assert_eq!(
            report.opaque,
            [("args".to_owned(), "argparse.Namespace".to_owned())]
        );
        let keep = |key: &str| {
            if key == "args" {
                Rename::Drop
            } else {
                Rename::Keep
            }
        };
        let known = View::new(&*source, keep, None).unwrap();
        assert_eq!(differences(&known, &*whole), [""; 0], "{name}");
        assert_eq!(known.read_value("iteration").unwrap(), PlainValue::Int(20));
        assert_converts(&known);
        // A copy for other ranks keeps the arguments as they are.
        let copy = parent.path().join(name);
        convert(
            &*source,
            &copy,
            OutputFormat::Dcp { ranks: 3 },
            ConvertOptions::default(),
        )
        .unwrap();
        assert_eq!(differences(&*source, &*opened(&copy)), [""; 0]);
    }
}
