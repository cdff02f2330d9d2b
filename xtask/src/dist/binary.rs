//! The static binary, and its debug information in a file of its own. It holds no path of the machine that built it.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

use super::tree::{Crates, ROOT};
use super::{Arch, Release, Site, TOOL};
use crate::steps::{first_line, run_command};

/// Longest time for a build from nothing.
const BUILD: Duration = Duration::from_secs(60 * 60);
/// Line tables make backtraces readable; the rest of debug information is several times as large.
const PROFILE: [&str; 2] = [
    r#"profile.release.debug="line-tables-only""#,
    "profile.release.strip=false",
];

/// Folders of this machine, and what the binary calls them. Later ones win where one is below another.
struct Prefixes(Vec<(PathBuf, String)>);

impl Prefixes {
    fn of(site: &Site<'_>, crates: &Crates) -> anyhow::Result<Self> {
        let mut rustc = site.sources.command("rustc");
        let sysroot = first_line(rustc.args(["--print", "sysroot"])).context("run rustc")?;
        let sysroot = PathBuf::from(sysroot);
        let version = crate::steps::stdout_of(site.sources.command("rustc").arg("-vV"), TOOL)?;
        let commit = version
            .lines()
            .find_map(|line| line.strip_prefix("commit-hash: "))
            .unwrap_or("unknown");
        // The name that the prebuilt library has for its sources, which a toolchain with rust-src undoes.
        let library = sysroot.join("lib/rustlib/src/rust");
        let mut all = Vec::new();
        if let Some(home) = cargo_home() {
            all.push((home, "/cargo".to_owned()));
        }
        // Their folder is called after the registry, or after its mirror.
        for folder in &crates.registries {
            all.push((folder.clone(), "/cargo/registry".to_owned()));
        }
        all.push((sysroot, "/rust".to_owned()));
        all.push((library, format!("/rustc/{commit}")));
        all.push((site.sources.root().to_path_buf(), "/adit".to_owned()));
        all.push((site.build.clone(), "/build".to_owned()));
        for (folder, _) in &all {
            let path = folder.to_string_lossy();
            ensure!(
                !path.contains(|c: char| c.is_whitespace() || c == '\'' || c == '='),
                "{path}: C compilers cannot be told of a folder with such a name; build elsewhere"
            );
        }
        Ok(Self(all))
    }

    /// As arguments, each behind `flag`.
    fn flags(&self, flag: &str) -> Vec<String> {
        let pairs = self.0.iter();
        pairs
            .map(|(folder, name)| format!("{flag}={}={name}", folder.display()))
            .collect()
    }

    /// A program that cargo calls instead of rustc: the flags are those of this machine, so that cargo does not hash them into
    /// names, which would then differ from machine to machine.
    fn wrapper(&self, folder: &Path) -> anyhow::Result<PathBuf> {
        let path = folder.join("rustc");
        let flags = self.flags("--remap-path-prefix").join("' '");
        fs::write(&path, format!("#!/bin/sh\nexec \"$@\" '{flags}'\n"))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        Ok(path)
    }

    /// Looks for each folder in a file.
    fn ensure_absent(&self, file: &Path) -> anyhow::Result<()> {
        let bytes = fs::read(file)?;
        let home = std::env::home_dir().filter(|home| home.components().count() > 2);
        let folders = self.0.iter().map(|(folder, _)| folder).chain(&home);
        for folder in folders {
            let path = folder.to_string_lossy();
            if let Some(at) = memory_find(&bytes, path.as_bytes()) {
                let around = &bytes[at..bytes.len().min(at + 200)];
                let text = String::from_utf8_lossy(around);
                let text = text.split('\0').next().unwrap_or_default();
                bail!("{} names a folder of this machine: {text}", file.display());
            }
        }
        Ok(())
    }
}

fn cargo_home() -> Option<PathBuf> {
    let given = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    given.or_else(|| Some(std::env::home_dir()?.join(".cargo")))
}

fn memory_find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    let first = *wanted.first()?;
    let mut from = 0;
    while let Some(at) = bytes.get(from..)?.iter().position(|byte| *byte == first) {
        if bytes[from + at..].starts_with(wanted) {
            return Some(from + at);
        }
        from += at + 1;
    }
    None
}

/// Builds `adit` with its debug information, and returns where it is.
///
/// # Errors
/// It does not build, or names a folder of this machine.
pub(super) fn build(
    site: &Site<'_>,
    release: &Release,
    arch: Arch,
    crates: &Crates,
) -> anyhow::Result<PathBuf> {
    let (prefixes, triple) = (Prefixes::of(site, crates)?, arch.triple());
    let mut cargo = site
        .sources
        .cargo(&["build", "--quiet", "--locked", "--release"]);
    cargo
        .args(["--package", ROOT, "--bin", ROOT, "--no-default-features"])
        .args(["--features", &crates.features.join(",")])
        .args(["--target", &triple])
        .args(PROFILE.iter().flat_map(|setting| ["--config", setting]))
        .env("CARGO_TARGET_DIR", &site.build)
        .env("RUSTC_WRAPPER", prefixes.wrapper(&site.build)?)
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .env("SOURCE_DATE_EPOCH", release.epoch.to_string())
        .env("ADIT_COMMIT", &release.commit)
        .env("ADIT_COMMIT_DATE", &release.day)
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    let variable = triple.replace('-', "_");
    cargo.env(
        format!("CFLAGS_{variable}"),
        prefixes.flags("-ffile-prefix-map").join(" "),
    );
    if !arch.is_of_host() {
        let gcc = arch.tool("gcc");
        let linker = format!("CARGO_TARGET_{}_LINKER", variable.to_uppercase());
        cargo.env(linker, &gcc).env(format!("CC_{variable}"), gcc);
    }
    run_command(&mut cargo, BUILD)?;
    let built = site.build.join(triple).join("release").join(ROOT);
    prefixes.ensure_absent(&built)?;
    Ok(built)
}

/// Takes the debug information out of a binary. Both become artefacts; returned is the one to run.
///
/// # Errors
/// Binutils do not know the binary, or it needs a library.
pub(super) fn split(
    site: &Site<'_>,
    release: &Release,
    arch: Arch,
    whole: &Path,
) -> anyhow::Result<PathBuf> {
    let (name, debug) = (release.name(arch, ""), release.name(arch, ".debug"));
    let objcopy = |args: &[&str], files: &[&Path]| {
        let mut objcopy = Command::new(arch.tool("objcopy"));
        // The link from one to the other is a name without a folder.
        objcopy.current_dir(&site.out).args(args).args(files);
        run_command(&mut objcopy, TOOL)
    };
    let whole = fs::canonicalize(whole)?;
    let (program, debug) = (Path::new(&name), Path::new(&debug));
    objcopy(
        &["--only-keep-debug", "--compress-debug-sections"],
        &[&whole, debug],
    )?;
    objcopy(&["--strip-all"], &[&whole, program])?;
    let link = format!("--add-gnu-debuglink={}", debug.display());
    objcopy(&[&link], &[program])?;
    // What binutils write has the rights of what they read, or of the umask.
    let out = site.out.join(program);
    fs::set_permissions(site.out.join(debug), fs::Permissions::from_mode(0o644))?;
    fs::set_permissions(&out, fs::Permissions::from_mode(0o755))?;
    let bytes = fs::read(&out)?;
    ensure!(
        memory_find(&bytes, b"/ld-linux").is_none(),
        "{} needs a dynamic linker: it is to be static",
        out.display()
    );
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_match_is_found_after_a_partial_match() {
        assert_eq!(memory_find(b"//home/a", b"/home"), Some(1));
        assert_eq!(memory_find(b"/hom", b"/home"), None);
        assert_eq!(memory_find(b"", b"/home"), None);
    }
}
