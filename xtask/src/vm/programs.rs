//! Programs in the machine: Adit's programs and test binaries, and some of the host's, each with the libraries it needs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

use super::image::Archive;
use crate::workspace::Workspace;

/// Time limit of the builds.
const LIMIT: Duration = Duration::from_secs(25 * 60);
/// Cargo test targets of the table, named by their folders.
const TEST_TARGETS: &[&str] = &["loopback", "kernel"];

/// Test binaries by their sources, and Adit's programs.
pub(super) struct Built {
    /// Root of the checkout they were built from.
    root: PathBuf,
    tests: BTreeMap<String, PathBuf>,
    /// `adit` and the load generator.
    bins: BTreeMap<String, PathBuf>,
}

impl Built {
    /// Builds the tests of `TEST_TARGETS` and the programs, in the profile of `cargo test`, so that its results are reused.
    ///
    /// # Errors
    /// A build fails.
    pub(super) fn build(workspace: &Workspace) -> anyhow::Result<Self> {
        let files = workspace.files("tunnel-daemon")?;
        let mut args = vec!["test", "--no-run", "--quiet"];
        for target in TEST_TARGETS {
            let main = format!("tests/{target}/main.rs");
            if files.iter().any(|file| file.ends_with(&main)) {
                args.extend(["--test", target]);
            }
        }
        let root = workspace.root();
        let tests = workspace.artifacts(&args, LIMIT)?.into_iter();
        let tests = tests.filter(|one| one.target.kind == ["test"]).map(|one| {
            let source = one.target.src_path;
            let below = source.strip_prefix(root).unwrap_or(&source);
            (below.display().to_string(), one.program)
        });
        let args = ["build", "--quiet", "--bin", "adit", "--bin", "adit-load"];
        let bins = workspace.artifacts(&args, LIMIT)?.into_iter();
        Ok(Self {
            root: root.to_owned(),
            tests: tests.collect(),
            bins: bins.map(|one| (one.target.name, one.program)).collect(),
        })
    }

    /// Root of the sources, which tests have compiled in.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// The test binary of a source.
    pub(super) fn test(&self, source: &str) -> Option<&Path> {
        self.tests.get(source).map(PathBuf::as_path)
    }

    /// A program of this workspace.
    ///
    /// # Errors
    /// Cargo has not built it.
    pub(super) fn bin(&self, name: &str) -> anyhow::Result<&Path> {
        let found = self.bins.get(name).map(PathBuf::as_path);
        found.with_context(|| format!("cargo built no {name}"))
    }
}

/// Path of a program of the host.
///
/// # Errors
/// The program is not installed.
pub(super) fn of_host(program: &str, package: &str) -> anyhow::Result<PathBuf> {
    ["/usr/bin", "/bin", "/usr/sbin", "/sbin"]
        .iter()
        .map(|folder| Path::new(folder).join(program))
        .find(|path| path.is_file())
        .with_context(|| format!("{program} is not installed: it comes with {package}"))
}

/// Adds a program at `path`, stripped of debug information, and its libraries where it looks for them.
///
/// # Errors
/// The program cannot be read, or a library is missing.
pub(super) fn add(archive: &mut Archive, path: &str, program: &Path) -> anyhow::Result<()> {
    archive.file(path, &stripped(program)?)?;
    for library in libraries(program)? {
        let code = fs::read(&library).with_context(|| format!("read {library}"))?;
        archive.file(&library, &code)?;
    }
    Ok(())
}

fn stripped(program: &Path) -> anyhow::Result<Vec<u8>> {
    let small = tempfile::NamedTempFile::new()?;
    let mut strip = Command::new("strip");
    strip
        .arg("--strip-debug")
        .arg("-o")
        .arg(small.path())
        .arg(program);
    // Without the tool the program is only larger.
    let from = match strip.output() {
        Ok(out) if out.status.success() => small.path(),
        _ => program,
    };
    fs::read(from).with_context(|| format!("read {}", program.display()))
}

/// Whether a program needs no shared library.
pub(super) fn is_static(program: &Path) -> anyhow::Result<bool> {
    Ok(libraries(program)?.is_empty())
}

/// Absolute paths of the libraries, including the loader; empty for a static program.
fn libraries(program: &Path) -> anyhow::Result<Vec<String>> {
    let out = Command::new("ldd")
        .arg(program)
        .output()
        .context("run ldd")?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let errors = String::from_utf8_lossy(&out.stderr).into_owned();
    if text.contains("statically linked") || errors.contains("not a dynamic executable") {
        return Ok(Vec::new());
    }
    ensure!(out.status.success(), "ldd {}: {errors}", program.display());
    parse_libraries(&text)
}

/// Parses lines `name => /path (address)` and `/path (address)`; names without a path belong to the kernel's vDSO.
fn parse_libraries(text: &str) -> anyhow::Result<Vec<String>> {
    let mut found = Vec::new();
    for line in text.lines() {
        if line.contains("not found") {
            bail!("a library is missing: {}", line.trim());
        }
        let place = line.split_once("=> ").map_or(line, |(_, place)| place);
        let path = place.split_whitespace().next().unwrap_or_default();
        if path.starts_with('/') {
            found.push(path.to_owned());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_with_libraries_is_not_static() {
        let own = std::env::current_exe().unwrap();
        assert!(!is_static(&own).unwrap());
    }

    #[test]
    fn libraries_include_the_loader() {
        let text = "\tlinux-vdso.so.1 (0x7ffd)\n\tlibc.so.6 => /lib/libc.so.6 (0x7f)\n\t/lib64/ld.so.2 (0x7f)\n";
        assert_eq!(
            parse_libraries(text).unwrap(),
            ["/lib/libc.so.6", "/lib64/ld.so.2"]
        );
        let error = parse_libraries("\tlibx.so.1 => not found\n").unwrap_err();
        assert!(error.to_string().contains("libx.so.1"));
    }
}
