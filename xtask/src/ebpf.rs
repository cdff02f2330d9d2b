//! `cargo xtask ebpf`: builds the eBPF object that the daemon embeds, or checks that the committed one is current.
//!
//! The object is committed, so that building Adit does not need this toolchain. A rebuild needs a nightly toolchain with the
//! sources of the standard library, and bpf-linker.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::fuzz::{NIGHTLY, rustup_run};
use crate::steps::{first_line, run_command};
use crate::workspace::Workspace;

const PROGRAMS: &str = "ebpf-programs/programs";
const LOCK: &str = "ebpf-programs/programs/Cargo.lock";
const ABI: &str = "ebpf-programs/abi";
const PINS: &str = "ebpf-programs/toolchain.toml";
const OBJECT: &str = "ebpf-programs/prebuilt/adit-ebpf.o";
const MANIFEST: &str = "ebpf-programs/prebuilt/manifest.toml";
/// Little-endian, as all supported machines are.
const TARGET: &str = "bpfel-unknown-none";
/// Time limit of a build from scratch.
const BUILD: Duration = Duration::from_secs(10 * 60);
/// Variable that tells cargo where the standard library's sources are if the toolchain lacks them.
const LIBRARY_VARIABLE: &str = "__CARGO_TESTS_ONLY_SRC_ROOT";

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

/// An object's hash, with the inputs and toolchain that built it.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    /// SHA-256 of the object that the daemon embeds.
    object: String,
    /// SHA-256 over the paths and contents of all sources.
    sources: String,
    /// SHA-256 of the lock file.
    lock: String,
    #[serde(flatten)]
    toolchain: Toolchain,
}

/// Versions of the tools that build an object.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Toolchain {
    rustc: String,
    #[serde(rename = "bpf-linker")]
    bpf_linker: String,
}

impl std::fmt::Display for Toolchain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { rustc, bpf_linker } = self;
        write!(f, "rustc {rustc} and bpf-linker {bpf_linker}")
    }
}

/// Rebuilds the object, or checks it.
///
/// # Errors
/// The toolchain is missing or not the pinned one, the build fails, or `--check` finds a difference.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    if args.check {
        return check(workspace);
    }
    let pinned = pins(workspace)?;
    let compiler = compiler(&pinned);
    let toolchain = availability(&compiler).map_err(anyhow::Error::msg)?;
    // Check before the build, which takes minutes: an object of other versions must not be committed.
    ensure!(
        args.fresh || toolchain == pinned,
        "{PINS} pins {pinned}, but here is {toolchain}: install the pinned versions as ebpf-programs/README.md says, build beside \
         the committed object with `--fresh`, or change the pins in a commit of their own"
    );
    let built = build(workspace, &compiler)?;
    if args.fresh {
        println!("{}", built.display());
        return Ok(());
    }
    let folder = workspace.path("ebpf-programs/prebuilt");
    std::fs::create_dir_all(folder).context("create the folder of the object")?;
    let object = std::fs::read(&built).with_context(|| format!("read {}", built.display()))?;
    std::fs::write(workspace.path(OBJECT), &object).with_context(|| format!("write {OBJECT}"))?;
    println!("{OBJECT}: {} bytes", object.len());
    let manifest = Manifest {
        object: hash_of(workspace, OBJECT)?,
        sources: sources(workspace)?,
        lock: hash_of(workspace, LOCK)?,
        toolchain,
    };
    std::fs::write(workspace.path(MANIFEST), written(&manifest))
        .with_context(|| format!("write {MANIFEST}"))?;
    Ok(())
}

/// Fails if an input changed since the committed object was built.
fn check(workspace: &Workspace) -> anyhow::Result<()> {
    let manifest = manifest(workspace)?;
    let mut changed = Vec::new();
    for (what, now, then) in [
        ("the object", hash_of(workspace, OBJECT)?, &manifest.object),
        ("the sources", sources(workspace)?, &manifest.sources),
        ("the lock file", hash_of(workspace, LOCK)?, &manifest.lock),
    ] {
        if now != *then {
            changed.push(what);
        }
    }
    if manifest.toolchain != pins(workspace)? {
        changed.push("the toolchain pins");
    }
    ensure!(
        changed.is_empty(),
        "{} changed since the object in ebpf-programs/prebuilt was built: run `cargo xtask ebpf`",
        changed.join(" and ")
    );
    Ok(())
}

/// SHA-256 of the object that the daemon embeds, from the manifest.
///
/// # Errors
/// There is no manifest, or it belongs to another object.
pub(crate) fn object_hash(workspace: &Workspace) -> anyhow::Result<String> {
    let Manifest { object, .. } = manifest(workspace)?;
    ensure!(
        hash_of(workspace, OBJECT)? == object,
        "{MANIFEST} is of another object than {OBJECT}: run `cargo xtask ebpf`"
    );
    Ok(object)
}

fn manifest(workspace: &Workspace) -> anyhow::Result<Manifest> {
    let text = workspace.text(MANIFEST)?.unwrap_or_default();
    toml::from_str(&text).with_context(|| format!("read {MANIFEST}"))
}

/// The rustup name of the pinned compiler, since another compiler builds another object. `nightly` is the latest one; the
/// pinned one may be installed under its date.
fn compiler(pinned: &Toolchain) -> String {
    let listed = Command::new("rustup").args(["toolchain", "list"]).output();
    let listed = listed.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    chosen(&listed.unwrap_or_default(), &pinned.rustc, version_of).to_owned()
}

/// The version of a rustup toolchain's compiler.
fn version_of(name: &str) -> Option<String> {
    first_line(rustup_run(name).args(["rustc", "--version"]))
}

/// The first of `nightly` and the dated toolchains whose compiler has this version; `nightly` if none has.
fn chosen<'a>(
    listed: &'a str,
    rustc: &str,
    version_of: impl Fn(&str) -> Option<String>,
) -> &'a str {
    let names = listed.lines().filter_map(|line| line.split(' ').next());
    let dated = names.filter(|name| name.starts_with("nightly-2"));
    std::iter::once(NIGHTLY)
        .chain(dated)
        .find(|&name| version_of(name).is_some_and(|said| stripped(&said, "rustc") == rustc))
        .unwrap_or(NIGHTLY)
}

/// A program's version output, without the program's name.
fn stripped(said: &str, name: &str) -> String {
    said.strip_prefix(name).unwrap_or(said).trim().to_owned()
}

/// The toolchain for objects that are only tested: the latest nightly of any version, or else the pinned one.
///
/// # Errors
/// Neither is installed; names what is missing and how to get it.
pub(crate) fn for_tests(workspace: &Workspace) -> Result<String, String> {
    if availability(NIGHTLY).is_ok() {
        return Ok(NIGHTLY.to_owned());
    }
    let pinned = pins(workspace).map_err(|error| format!("{error:#}"))?;
    let name = compiler(&pinned);
    availability(&name).map(|_versions| name)
}

/// The versions that this rustup toolchain would use for an object, or what is missing and how to get it.
fn availability(name: &str) -> Result<Toolchain, String> {
    let rustc = version_of(name).ok_or_else(|| {
        format!(
            "no nightly toolchain: `rustup toolchain install {name} --profile minimal --component rust-src`"
        )
    })?;
    let sysroot = first_line(rustup_run(name).args(["rustc", "--print", "sysroot"]));
    let sysroot = sysroot.unwrap_or_default();
    let own = Path::new(&sysroot).join("lib/rustlib/src/rust/library/Cargo.lock");
    if !own.is_file() && std::env::var_os(LIBRARY_VARIABLE).is_none() {
        return Err(format!(
            "no sources of the standard library: `rustup component add rust-src --toolchain {name}`, or name those of \
             your distribution's package in {LIBRARY_VARIABLE}"
        ));
    }
    let linker = first_line(Command::new("bpf-linker").arg("--version"))
        .ok_or_else(|| "no bpf-linker on PATH: `cargo install bpf-linker`".to_owned())?;
    Ok(Toolchain {
        rustc: stripped(&rustc, "rustc"),
        bpf_linker: stripped(&linker, "bpf-linker"),
    })
}

/// Builds the programs with a rustup toolchain and returns the object's path.
pub(crate) fn build(workspace: &Workspace, name: &str) -> anyhow::Result<PathBuf> {
    let target = workspace.path("target/ebpf");
    let mut command = rustup_run(name);
    command
        .args(["cargo", "build", "--quiet", "--locked", "--release"])
        .args(["-Z", "build-std=core", "--target", TARGET])
        .arg("--target-dir")
        .arg(&target)
        .current_dir(workspace.path(PROGRAMS))
        .env_remove("RUSTFLAGS")
        // Keeps this machine's paths out of the object. The library needs the architecture flag; this project's programs do
        // not.
        .env("CARGO_ENCODED_RUSTFLAGS", flags(workspace));
    run_command(&mut command, BUILD)?;
    let built = target.join(TARGET).join("release/adit-ebpf");
    ensure!(built.is_file(), "the build left no {}", built.display());
    Ok(built)
}

fn flags(workspace: &Workspace) -> String {
    let mut flags = vec![
        "--cfg=bpf_target_arch=\"x86_64\"".to_owned(),
        "-Cdebuginfo=2".to_owned(),
        "-Clink-arg=--btf".to_owned(),
        format!("--remap-path-prefix={}=.", workspace.root().display()),
    ];
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home =
        home.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cargo")));
    if let Some(home) = home {
        flags.push(format!("--remap-path-prefix={}=cargo", home.display()));
    }
    if let Some(library) = std::env::var_os(LIBRARY_VARIABLE) {
        flags.push(format!(
            "--remap-path-prefix={}=library",
            Path::new(&library).display()
        ));
    }
    flags.join("\u{1f}")
}

fn pins(workspace: &Workspace) -> anyhow::Result<Toolchain> {
    let text = workspace.text(PINS)?.unwrap_or_default();
    toml::from_str(&text).with_context(|| format!("read {PINS}"))
}

/// One hash over all compiled sources of both packages.
fn sources(workspace: &Workspace) -> anyhow::Result<String> {
    let mut files = workspace.files(ABI)?;
    files.extend(workspace.files(PROGRAMS)?);
    files.retain(|file| file != LOCK);
    if files.is_empty() {
        bail!("no sources below {ABI} and {PROGRAMS}");
    }
    let mut hasher = Sha256::new();
    for file in files {
        let bytes = std::fs::read(workspace.path(&file)).with_context(|| format!("read {file}"))?;
        hasher.update(file.as_bytes());
        hasher.update([0]);
        hasher.update(bytes.len().to_le_bytes());
        hasher.update(&bytes);
    }
    Ok(format!("{:x}", hasher.finalize()))
}

fn hash_of(workspace: &Workspace, file: &str) -> anyhow::Result<String> {
    let bytes = std::fs::read(workspace.path(file)).with_context(|| format!("read {file}"))?;
    Ok(format!("{:x}", Sha256::digest(bytes)))
}

fn written(manifest: &Manifest) -> String {
    let Manifest {
        object,
        sources,
        lock,
        toolchain: Toolchain { rustc, bpf_linker },
    } = manifest;
    format!(
        "# Made by `cargo xtask ebpf`; do not edit.\nobject = \"{object}\"\nsources = \"{sources}\"\nlock = \"{lock}\"\n\
         rustc = \"{rustc}\"\nbpf-linker = \"{bpf_linker}\"\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: [(&str, &str); 5] = [
        ("ebpf-programs/abi/src/lib.rs", "//! abi"),
        ("ebpf-programs/programs/src/main.rs", "//! programs"),
        (LOCK, "lock"),
        (OBJECT, "object"),
        (PINS, "rustc = \"1\"\nbpf-linker = \"2\"\n"),
    ];

    /// A tree whose manifest fits.
    fn tree() -> (tempfile::TempDir, Workspace) {
        let folder = tempfile::tempdir().unwrap();
        let workspace = Workspace::at(folder.path());
        for (file, text) in FILES {
            let path = workspace.path(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let manifest = Manifest {
            object: hash_of(&workspace, OBJECT).unwrap(),
            sources: sources(&workspace).unwrap(),
            lock: hash_of(&workspace, LOCK).unwrap(),
            toolchain: pins(&workspace).unwrap(),
        };
        std::fs::write(workspace.path(MANIFEST), written(&manifest)).unwrap();
        (folder, workspace)
    }

    #[test]
    fn each_change_is_found_and_named() {
        let (_folder, workspace) = tree();
        check(&workspace).unwrap();
        for (at, what) in [
            "sources",
            "sources",
            "lock file",
            "object",
            "toolchain pins",
        ]
        .into_iter()
        .enumerate()
        {
            let (_folder, workspace) = tree();
            let (file, text) = FILES[at];
            std::fs::write(workspace.path(file), text.replace('1', "3") + "\n#\n").unwrap();
            let error = check(&workspace).unwrap_err().to_string();
            assert!(error.contains(what), "{file}: {error}");
        }
    }

    #[test]
    fn the_object_hash_is_verified() {
        let (_folder, workspace) = tree();
        assert_eq!(
            object_hash(&workspace).unwrap(),
            hash_of(&workspace, OBJECT).unwrap()
        );
        std::fs::write(workspace.path(OBJECT), "another").unwrap();
        let error = object_hash(&workspace).unwrap_err().to_string();
        assert!(error.contains("another object"), "{error}");
    }

    #[test]
    fn the_toolchain_is_chosen_by_version_not_by_name() {
        let listed = [
            "stable-x86_64-unknown-linux-gnu (active, default)",
            "nightly-x86_64-unknown-linux-gnu",
            "nightly-2026-01-01-x86_64-unknown-linux-gnu",
            "nightly-2026-05-20-x86_64-unknown-linux-gnu (override)",
        ]
        .join("\n");
        let version_of = |name: &str| {
            let date = name.strip_prefix("nightly-");
            let date = date.and_then(|rest| rest.get(..10)).unwrap_or("2026-09-09");
            Some(format!("rustc 1.0.0-nightly (abc {date})"))
        };
        for (date, name) in [
            ("2026-05-20", "nightly-2026-05-20-x86_64-unknown-linux-gnu"),
            ("2026-09-09", "nightly"),
            ("2026-02-02", "nightly"),
        ] {
            let rustc = format!("1.0.0-nightly (abc {date})");
            assert_eq!(chosen(&listed, &rustc, version_of), name, "{date}");
            assert_eq!(chosen("", &rustc, version_of), "nightly", "{date}");
        }
        assert_eq!(chosen(&listed, "1.0.0", |_name| None), "nightly");
    }

    #[test]
    fn a_new_source_is_a_change() {
        let (_folder, workspace) = tree();
        std::fs::write(workspace.path("ebpf-programs/programs/src/new.rs"), "").unwrap();
        let error = check(&workspace).unwrap_err().to_string();
        assert!(error.contains("sources"), "{error}");
    }
}
