//! `cargo xtask ebpf`: builds the eBPF object that the daemon embeds, or checks that the committed one is current; see `ebpf.sh`.

use std::path::PathBuf;

use crate::script;
use crate::steps::{MINUTES_5, Outcome, output_of};
use crate::workspace::Workspace;

/// Whether to write.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Build nothing; fail when sources, lock file, toolchain pins, object and manifest do not belong together.
    #[arg(long, conflicts_with = "fresh")]
    check: bool,
    /// Build with whatever versions are here, print where the object is, and leave the committed one alone.
    #[arg(long)]
    fresh: bool,
}

/// Rebuilds the object, or checks it.
///
/// # Errors
/// The toolchain is missing or not the pinned one, the build fails, or `--check` finds a difference.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> anyhow::Result<Outcome> {
    let mode = match (args.check, args.fresh) {
        (true, _) => "check",
        (_, true) => "fresh",
        _ => "write",
    };
    script::outcome(script::command(workspace, "ebpf").arg(mode))
}

/// SHA-256 of the object that the daemon embeds, from the manifest.
///
/// # Errors
/// There is no manifest, or it belongs to another object.
pub(crate) fn object_hash(workspace: &Workspace) -> anyhow::Result<String> {
    let hash = output_of(script::command(workspace, "ebpf").arg("hash"), MINUTES_5)?;
    Ok(hash.stdout.trim().to_owned())
}

/// Where a build with `fresh` leaves an object.
pub(crate) fn fresh_object(workspace: &Workspace) -> PathBuf {
    workspace
        .target()
        .join("ebpf/bpfel-unknown-none/release/adit-ebpf")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::tidy::sample;
    use crate::workspace::sha256;

    const LOCK: &str = "ebpf-programs/programs/Cargo.lock";
    const OBJECT: &str = "ebpf-programs/prebuilt/adit-ebpf.o";
    const FILES: [(&str, &str); 5] = [
        ("ebpf-programs/abi/src/lib.rs", "//! abi"),
        ("ebpf-programs/programs/src/main.rs", "//! programs"),
        (LOCK, "lock"),
        (OBJECT, "object"),
        (
            "ebpf-programs/toolchain.toml",
            "rustc = \"1\"\nbpf-linker = \"2\"\n",
        ),
    ];
    /// SHA-256 over path, length and contents of both sources.
    const SOURCES: &str = "c0fe9ebed08594e5c667693e6acb695412546d7965d2524dcd1df0cf3b15e6a5";

    /// A tree whose manifest fits.
    fn tree() -> (tempfile::TempDir, Workspace) {
        let (folder, workspace) = sample(&FILES);
        let scripts = workspace.path("xtask/scripts");
        std::fs::create_dir_all(&scripts).unwrap();
        for name in ["common.sh", "ebpf.sh"] {
            let from = Workspace::here().unwrap().path("xtask/scripts").join(name);
            std::fs::copy(from, scripts.join(name)).unwrap();
        }
        let [object, lock] = [OBJECT, LOCK].map(|file| sha256(&workspace.path(file)).unwrap());
        let text = format!(
            "# Made by `cargo xtask ebpf`; do not edit.\nobject = \"{object}\"\nsources = \"{SOURCES}\"\nlock = \"{lock}\"\n\
             rustc = \"1\"\nbpf-linker = \"2\"\n"
        );
        let manifest = workspace.path("ebpf-programs/prebuilt/manifest.toml");
        std::fs::write(manifest, text).unwrap();
        (folder, workspace)
    }

    fn check(workspace: &Workspace) -> Result<(), String> {
        let mut check = script::command(workspace, "ebpf");
        let checked = output_of(check.arg("check"), MINUTES_5);
        checked.map(drop).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn each_change_is_found_and_named() {
        let (_folder, workspace) = tree();
        check(&workspace).unwrap();
        for (at, what) in ["sources", "sources", "lock", "object", "rustc"]
            .into_iter()
            .enumerate()
        {
            let (_folder, workspace) = tree();
            let (file, text) = FILES[at];
            std::fs::write(workspace.path(file), text.replace('1', "3") + "\n#\n").unwrap();
            let error = check(&workspace).unwrap_err();
            assert!(
                error.contains(&format!("was built: {what};")),
                "{file}: {error}"
            );
        }
    }

    #[test]
    fn the_object_hash_is_verified() {
        let (_folder, workspace) = tree();
        let object = workspace.path(OBJECT);
        assert_eq!(object_hash(&workspace).unwrap(), sha256(&object).unwrap());
        std::fs::write(object, "another").unwrap();
        let error = format!("{:#}", object_hash(&workspace).unwrap_err());
        assert!(error.contains("another object"), "{error}");
    }

    #[test]
    fn the_toolchain_is_chosen_by_version_not_by_name() {
        let (folder, workspace) = tree();
        // Stands in for rustup: a toolchain has the date of its name, and `nightly` is the latest.
        let rustup = "#!/bin/sh\nlisted='stable-x nightly-x nightly-2026-01-01-x nightly-2026-05-20-x'\n\
                      test $1 = toolchain && printf '%s (some)\\n' $listed && exit\n\
                      date=$(expr $2 : 'nightly-\\(.*\\)-x') || date=2026-09-09\necho \"rustc 1.0.0-nightly (abc $date)\"\n";
        let path = folder.path().join("rustup");
        std::fs::write(&path, rustup).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        for (date, name) in [
            ("2026-05-20", "nightly-2026-05-20-x\n"),
            ("2026-09-09", "nightly\n"),
            ("2026-02-02", "nightly\n"),
        ] {
            let pins = format!("rustc = \"1.0.0-nightly (abc {date})\"\nbpf-linker = \"2\"\n");
            std::fs::write(workspace.path(FILES[4].0), pins).unwrap();
            let path = format!("{}:/usr/bin:/bin", folder.path().display());
            let mut command = script::command(&workspace, "ebpf");
            let chosen = output_of(command.arg("toolchain").env("PATH", path), MINUTES_5);
            assert_eq!(chosen.unwrap().stdout, name, "{date}");
        }
    }

    #[test]
    fn a_new_source_is_a_change() {
        let (_folder, workspace) = tree();
        std::fs::write(workspace.path("ebpf-programs/programs/src/new.rs"), "").unwrap();
        let error = check(&workspace).unwrap_err();
        assert!(error.contains("was built: sources;"), "{error}");
    }
}
