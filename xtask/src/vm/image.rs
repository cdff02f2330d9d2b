//! A machine's first file system: what cargo has built, and the entries. `initramfs.sh` adds programs of the host, libraries and
//! modules, and packs all of it.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;

use super::entries::{Entry, MODULES, Run};
use crate::script;
use crate::steps::{MINUTES_5, run_command};
use crate::workspace::{Workspace, fresh};

/// Time limit of the builds.
const LIMIT: Duration = Duration::from_secs(25 * 60);
/// Cargo test targets of the table, named by their folders.
const TEST_TARGETS: &[&str] = &["loopback", "kernel"];

/// Test binaries by their sources, and Adit's programs by their names.
pub(super) struct Built {
    tests: BTreeMap<String, PathBuf>,
    programs: BTreeMap<String, PathBuf>,
}

impl Built {
    /// Builds the tests of `TEST_TARGETS` and the programs, in the profile of `cargo test`, so that its results are reused.
    ///
    /// # Errors
    /// A build fails.
    pub(super) fn build(workspace: &Workspace) -> anyhow::Result<Self> {
        let mut args = vec!["test", "--no-run", "--quiet"];
        args.extend(TEST_TARGETS.iter().flat_map(|target| ["--test", target]));
        let tests = workspace.artifacts(&args, LIMIT)?.into_iter();
        let tests = tests.filter(|one| one.target.kind == ["test"]).map(|one| {
            let source = one.target.src_path;
            let below = source.strip_prefix(workspace.root()).unwrap_or(&source);
            (below.display().to_string(), one.program)
        });
        let args = ["build", "--quiet", "--bin", "adit", "--bin", "adit-load"];
        let programs = workspace.artifacts(&args, LIMIT)?.into_iter();
        Ok(Self {
            tests: tests.collect(),
            programs: programs.map(|one| (one.target.name, one.program)).collect(),
        })
    }

    /// The test binary of a source.
    pub(super) fn test(&self, source: &str) -> Option<&Path> {
        self.tests.get(source).map(PathBuf::as_path)
    }
}

/// Packs the part of the image that all kernels share into a file. `given` is an `adit` for scripts that replaces the built one.
///
/// # Errors
/// A program is missing, or cannot be packed.
pub(super) fn common(
    workspace: &Workspace,
    given: Option<&Path>,
    built: &Built,
    entries: &[&Entry],
    file: &Path,
) -> anyhow::Result<()> {
    let root = file.with_extension("root");
    fresh(&root)?;
    for folder in ["entries", "limits"] {
        fs::create_dir(root.join(folder))?;
    }
    let mut programs = BTreeMap::new();
    for (at, entry) in entries.iter().enumerate() {
        // The number keeps the entries in order.
        let name = console_name(at, entry);
        let script = match entry.run {
            Run::Fact(commands) | Run::Script(commands) => commands.to_owned(),
            Run::Tests { source, args } => {
                let path = format!("/tests/{}", source.replace(['/', '.'], "-"));
                let script = format!("exec {path} {args}");
                programs.insert(path, built.test(source).context("a test is built")?);
                script
            }
        };
        fs::write(root.join("entries").join(&name), script)?;
        fs::write(
            root.join("limits").join(&name),
            entry.limit_seconds.to_string(),
        )?;
    }
    let program = |name| {
        built
            .programs
            .get(name)
            .with_context(|| format!("cargo built no {name}"))
    };
    let adit = program("adit")?;
    programs.insert("/bin/adit".to_owned(), given.unwrap_or(adit));
    programs.insert("/bin/adit-load".to_owned(), program("adit-load")?);
    // Tests look for `adit` where cargo left it.
    if given.is_some() {
        programs.insert(adit.display().to_string(), adit);
    } else {
        let link = root.join(adit.strip_prefix("/")?);
        fs::create_dir_all(link.parent().context("a program is in a folder")?)?;
        symlink("/bin/adit", link)?;
    }
    let mut pack = script::command(workspace, "initramfs");
    pack.arg("programs").arg(&root).arg(file);
    for (path, program) in programs {
        pack.arg(format!("{path}={}", program.display()));
    }
    run_command(&mut pack, MINUTES_5)?;
    Ok(fs::remove_dir_all(&root)?)
}

/// Packs the kernel's modules, numbered in loading order, and its configuration.
///
/// # Errors
/// A module cannot be read.
pub(super) fn of_kernel(workspace: &Workspace, kernel: &Path, file: &Path) -> anyhow::Result<()> {
    let mut pack = script::command(workspace, "initramfs");
    pack.arg("modules").arg(kernel).arg(file).args(MODULES);
    run_command(&mut pack, MINUTES_5)
}

/// The name of an entry on the console.
pub(super) fn console_name(at: usize, entry: &Entry) -> String {
    format!("{at:02}-{}", entry.name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steps::stdout_of;

    #[test]
    fn modules_are_listed_once_after_their_dependencies() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, depends: &str| {
            let text = format!("ELF\0license=GPL\0depends={depends}\0name=x\0");
            fs::write(folder.path().join(name), text).unwrap();
        };
        fs::create_dir(folder.path().join("net")).unwrap();
        write("net/tcp-diag.ko", "inet_diag");
        write("inet_diag.ko", "");
        write("tls.ko", "");
        fs::write(folder.path().join("config"), "").unwrap();
        let workspace = Workspace::here().unwrap();
        let list = |wanted: &[&str]| {
            let mut list = script::command(&workspace, "initramfs");
            list.arg("modules").arg(folder.path()).arg("-").args(wanted);
            stdout_of(&mut list, MINUTES_5).unwrap()
        };
        assert_eq!(
            list(&["tcp_diag", "inet_diag", "absent", "tls"]),
            "00-inet_diag.ko\n01-tcp_diag.ko\n02-tls.ko\n"
        );
    }
}
