//! A machine's first file system: programs, tests, modules and entries.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, ensure};
use cpio::newc::{Builder, trailer};

use super::entries::{Entry, MODULES, Run};
use super::kernels::Kernel;
use super::modules;
use super::programs::{self, Built};

/// Programs of the host for scripts and tests in the machine, with their packages. Busybox's versions lack features, and they
/// start other busybox programs: busybox's `nsenter` runs its own `ip`, whatever PATH says.
const OF_HOST: &[(&str, &str)] = &[
    ("ip", "iproute2"),
    ("tc", "iproute2"),
    ("nft", "nftables"),
    ("nsenter", "util-linux"),
    ("setpriv", "util-linux"),
    ("unshare", "util-linux"),
];
/// The first process and the commands of scripts. It must be static, since it runs before all others.
const BUSYBOX: (&str, &str) = ("busybox", "busybox-static");

/// The shell of scripts.
const SHELL: (&str, &str) = ("dash", "dash");

/// The package whose tests start Adit under seccomp profiles, and the profiles' paths, relative to the root.
const PROFILES_OF: &str = "tunnel-daemon";
const PROFILES: [&str; 2] = ["deploy/seccomp/server.json", "deploy/seccomp/agent.json"];

/// Why programs of the machine are missing; `None` if all are installed.
pub(super) fn missing() -> Option<String> {
    [BUSYBOX, SHELL]
        .iter()
        .chain(OF_HOST)
        .find_map(|(program, package)| programs::of_host(program, package).err())
        .map(|error| format!("{error:#}"))
}

/// File types and modes of the entries.
const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const LINK: u32 = 0o120_777;

/// An archive in the format that a kernel unpacks as its first file system. Parent folders are added automatically; the first
/// entry at a path wins.
#[derive(Default)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    names: BTreeSet<String>,
}

impl Archive {
    /// Adds an executable file at an absolute path.
    ///
    /// # Errors
    /// The file is longer than the format allows.
    pub(super) fn file(&mut self, path: &str, contents: &[u8]) -> anyhow::Result<()> {
        self.add(path, PROGRAM, contents)
    }

    fn link(&mut self, path: &str, to: &str) -> anyhow::Result<()> {
        self.add(path, LINK, to.as_bytes())
    }

    fn folder(&mut self, path: &str) -> anyhow::Result<()> {
        self.add(path, FOLDER, &[])
    }

    fn add(&mut self, path: &str, mode: u32, contents: &[u8]) -> anyhow::Result<()> {
        let name = path.trim_matches('/');
        if let Some((above, _)) = name.rsplit_once('/') {
            self.folder(above)?;
        }
        if self.names.insert(name.to_owned()) {
            let (inode, length) = (self.names.len().try_into()?, contents.len().try_into()?);
            let entry = Builder::new(name).ino(inode).mode(mode);
            let mut entry = entry.write(&mut self.bytes, length);
            entry.write_all(contents)?;
            entry.finish()?;
        }
        Ok(())
    }

    fn finish(self) -> anyhow::Result<Vec<u8>> {
        Ok(trailer(self.bytes)?)
    }
}

/// The part of the image that all kernels share. `given` is an `adit` for scripts that replaces the built one.
///
/// # Errors
/// A program cannot be read.
pub(super) fn common(
    given: Option<&Path>,
    built: &Built,
    entries: &[&Entry],
) -> anyhow::Result<Vec<u8>> {
    let mut archive = Archive::default();
    archive.file("/init", include_bytes!("init.sh"))?;
    for folder in ["/root", "/tmp", "/etc", "/var/tmp", "/sbin", "/usr/bin"] {
        archive.folder(folder)?;
    }
    archive.file(
        "/etc/passwd",
        b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
    )?;
    archive.file("/etc/group", b"root:x:0:\nnogroup:x:65534:\n")?;
    archive.file("/etc/hosts", b"127.0.0.1 localhost\n::1 localhost\n")?;
    let busybox = programs::of_host(BUSYBOX.0, BUSYBOX.1)?;
    // The first process runs before a loader exists: a dynamic program would make the kernel panic.
    ensure!(
        programs::is_static(&busybox)?,
        "{} needs libraries: install {}, which does not",
        busybox.display(),
        BUSYBOX.1
    );
    archive.file("/bin/busybox", &fs::read(busybox)?)?;
    for (program, package) in OF_HOST {
        let found = programs::of_host(program, package)?;
        programs::add(&mut archive, &format!("/host/{program}"), &found)?;
    }
    // Busybox's shell would prefer its own `ip` to the host's.
    let shell = programs::of_host(SHELL.0, SHELL.1)?;
    programs::add(&mut archive, "/host/sh", &shell)?;
    archive.link("/bin/sh", "/host/sh")?;
    let adit = built.bin("adit")?;
    programs::add(&mut archive, "/bin/adit", given.unwrap_or(adit))?;
    // Tests look for `adit` where cargo left it.
    let at = adit.display().to_string();
    match given {
        Some(_) => programs::add(&mut archive, &at, adit)?,
        None => archive.link(&at, "/bin/adit")?,
    }
    programs::add(&mut archive, "/bin/adit-load", built.bin("adit-load")?)?;
    profiles(&mut archive, built.root())?;
    for (at, entry) in entries.iter().enumerate() {
        let (script, program) = script(entry, built);
        if let Some((path, program)) = program {
            programs::add(&mut archive, &path, program)?;
        }
        // The number keeps the entries in order.
        let name = console_name(at, entry);
        archive.file(&format!("/entries/{name}"), script.as_bytes())?;
        archive.file(
            &format!("/limits/{name}"),
            entry.limit_seconds.to_string().as_bytes(),
        )?;
    }
    archive.finish()
}

/// Adds the seccomp profiles at the paths where tests look for them.
///
/// # Errors
/// A profile cannot be read.
fn profiles(archive: &mut Archive, root: &Path) -> anyhow::Result<()> {
    // The tests' relative paths go through this folder and back, so it must exist.
    archive.folder(&root.join(PROFILES_OF).display().to_string())?;
    for profile in PROFILES {
        let at = root.join(profile).display().to_string();
        let contents = fs::read(&at).with_context(|| format!("read {at}"))?;
        archive.file(&at, &contents)?;
    }
    Ok(())
}

/// The kernel's modules, numbered in loading order, and its configuration. A kernel unpacks concatenated archives.
///
/// # Errors
/// A module cannot be read.
pub(super) fn of_kernel(kernel: &Kernel) -> anyhow::Result<Vec<u8>> {
    let mut archive = Archive::default();
    archive.folder("/modules")?;
    for (at, module) in modules::wanted(kernel.folder(), MODULES)?
        .iter()
        .enumerate()
    {
        archive.file(
            &format!("/modules/{at:02}-{}.ko", module.name),
            &module.code,
        )?;
    }
    archive.file("/boot/config", &fs::read(kernel.config()?)?)?;
    archive.finish()
}

/// The name of an entry on the console.
pub(super) fn console_name(at: usize, entry: &Entry) -> String {
    format!("{at:02}-{}", entry.name)
}

/// The shell script of an entry, and the test binary it needs; several entries may share a binary.
fn script<'a>(entry: &Entry, built: &'a Built) -> (String, Option<(String, &'a Path)>) {
    match entry.run {
        Run::Fact(commands) | Run::Script(commands) => (commands.to_owned(), None),
        Run::Tests { source, args } => {
            let path = format!("/tests/{}", source.replace(['/', '.'], "-"));
            let script = format!("exec {path} {args}");
            (script, built.test(source).map(|program| (path, program)))
        }
    }
}
