//! How a real library is found and opened. Each test runs in a process of its own, since a process has one UCX and
//! keeps it.
//!
//! Needs UCX: without one it fails.

#![allow(clippy::unwrap_used, reason = "the helpers of a test may fail it")]

use std::collections::BTreeSet;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, ptr};

use ucx_sys::*;

/// Tells the process that `isolated` starts which test it is.
const TEST_VARIABLE: &str = "UCX_SYS_TEST";

/// Runs `body` in a new process with the environment that `prepare` makes of this one's. The test that calls it runs
/// twice, here and there, and must be named `test`.
fn isolated(test: &str, prepare: impl FnOnce(&mut Command), body: impl FnOnce()) {
    if env::var_os(TEST_VARIABLE).is_some_and(|name| name == test) {
        return body();
    }
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(TEST_VARIABLE, test);
    for name in ["UCX_HANDLE_ERRORS", "UCX_DEBUG_SIGNO", "UCX_LOG_FILE", "UCX_MODULE_DIR"] {
        command.env_remove(name);
    }
    prepare(&mut command);
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}\n{}{}", output.status, text(&output.stdout), text(&output.stderr));
    assert!(!text(&output.stdout).contains(" UCX "), "UCX logs to standard output: {}", text(&output.stdout));
    assert!(text(&output.stdout).contains("1 passed"), "{test} is not the name of the test");
}

/// The directory of the UCX that tests run with.
fn real_directory() -> PathBuf {
    load().unwrap().path().parent().unwrap().to_path_buf()
}

/// The value that `prepare` gave to a variable.
fn given(name: &str) -> PathBuf {
    env::var_os(name).unwrap().into()
}

fn not_found(result: Result<&Ucx, LoadError>) -> Vec<Attempt> {
    match result {
        Err(LoadError::NotFound { tried }) => tried,
        other => panic!("{other:?}"),
    }
}

fn mapped_files(part_of_name: &str) -> BTreeSet<String> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let files = maps.lines().filter_map(|line| line.find('/').map(|start| &line[start..]));
    files.filter(|file| file.contains(part_of_name)).map(str::to_owned).collect()
}

/// A bit for each signal that has a handler; signal n is bit n - 1.
fn caught_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
    u64::from_str_radix(line.trim(), 16).unwrap()
}

fn initialise(ucx: &Ucx) {
    try_initialise(ucx).unwrap();
}

fn try_initialise(ucx: &Ucx) -> Result<(), Status> {
    let params = ucp_params_t { field_mask: UCP_PARAM_FIELD_FEATURES, features: UCP_FEATURE_RMA, ..Default::default() };
    let mut context = ptr::null_mut();
    // SAFETY: the parameters are initialised and null stands for the configuration of the environment.
    unsafe { ucx.ucp_init(&params, ptr::null(), &mut context) }.check()?;
    // SAFETY: nothing was made of the context.
    unsafe { ucx.ucp_cleanup(context) };
    Ok(())
}

/// A library that exports `functions` as far as names go, and says that it is UCX 1.12.1.
fn build_fake(directory: &Path, functions: &[&str]) {
    let mut source = String::new();
    for name in functions {
        let (arguments, body) = match *name {
            "ucp_get_version" => {
                ("major: &mut u32, minor: &mut u32, release: &mut u32", "(*major, *minor, *release) = (1, 12, 1);")
            }
            _ => ("", ""),
        };
        source += &format!("#[unsafe(no_mangle)] pub extern \"C\" fn {name}({arguments}) {{ {body} }}\n");
    }
    fs::write(directory.join("fake.rs"), source).unwrap();
    let mut rustc = Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    rustc.current_dir(directory).args(["--edition=2024", "--crate-type=cdylib", "-olibucp.so.0", "fake.rs"]);
    let output = rustc.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The functions of the table, from the generated file.
fn required_functions() -> Vec<&'static str> {
    let table = include_str!("../src/bindings.rs").split_once("required:").unwrap().1;
    let required = table.split_once("optional:").unwrap().0;
    let names = required.lines().filter_map(|line| line.trim().strip_prefix("fn ")?.split('(').next());
    names.collect()
}

#[test]
fn loading_installs_no_signal_handler_and_leaves_the_environment_as_it_was() {
    isolated(
        "loading_installs_no_signal_handler_and_leaves_the_environment_as_it_was",
        |_| (),
        || {
            let before = (caught_signals(), env::vars_os().collect::<Vec<_>>());
            initialise(load().unwrap());
            assert_eq!((caught_signals(), env::vars_os().collect::<Vec<_>>()), before);
        },
    );
}

/// Also shows that the test above could fail.
#[test]
fn what_the_user_says_about_signals_is_kept() {
    isolated(
        "what_the_user_says_about_signals_is_kept",
        |command| {
            command.env("UCX_DEBUG_SIGNO", "SIGUSR2");
        },
        || {
            let before = caught_signals();
            load().unwrap();
            assert_eq!(caught_signals() & !before, 1 << (12 - 1));
        },
    );
}

#[test]
fn ucx_does_not_log_to_standard_output() {
    isolated(
        "ucx_does_not_log_to_standard_output",
        |command| {
            command.env("UCX_TLS", "no-such-transport").env("UCX_LOG_LEVEL", "warn");
        },
        || assert!(try_initialise(load().unwrap()).is_err()),
    );
}

#[test]
fn a_failed_load_names_the_place_and_may_be_repeated() {
    let home = tempfile::tempdir().unwrap();
    isolated(
        "a_failed_load_names_the_place_and_may_be_repeated",
        |command| {
            command.env(DIRECTORY_VARIABLE, home.path().join("ucx")).env("REAL", real_directory());
        },
        || {
            let directory = given(DIRECTORY_VARIABLE);
            let error = load().unwrap_err();
            assert!(error.to_string().contains(&format!("KVFERRY_UCX_DIR {}: no libucp there", directory.display())));
            assert_eq!(not_found(Err(error)).len(), 1);
            assert_eq!(mapped_files("libucp"), BTreeSet::new());

            symlink(given("REAL"), &directory).unwrap();
            let ucx = load().unwrap();
            assert_eq!(ucx.origin(), Origin::Variable);
            assert_eq!(ucx.path().parent().unwrap(), given("REAL"));
            assert_eq!(ucx.overridden_directory(), None);
        },
    );
}

#[test]
fn every_place_that_was_tried_is_listed_with_its_reason() {
    let home = tempfile::tempdir().unwrap();
    isolated(
        "every_place_that_was_tried_is_listed_with_its_reason",
        |command| {
            let packages = home.path().join("lib/python3.12/site-packages");
            fs::create_dir_all(&packages).unwrap();
            // A libucp that cannot be loaded stops the loader's search, whatever the machine has installed.
            fs::write(home.path().join("libucp.so.0"), "not a library").unwrap();
            command.env_clear().env(TEST_VARIABLE, "every_place_that_was_tried_is_listed_with_its_reason");
            command.env("LD_LIBRARY_PATH", home.path()).env("VIRTUAL_ENV", home.path()).env("HOME", home.path());
        },
        || {
            // The machine's own Python or `/opt` may have a UCX: then the search ends there, and rightly.
            let tried = match load() {
                Ok(ucx) => return assert!(matches!(ucx.origin(), Origin::Wheel | Origin::WellKnown), "{ucx:?}"),
                failed => not_found(failed),
            };
            assert_eq!((tried[0].origin, &tried[0].place), (Origin::Loader, &Place::Name("libucp.so.0")));
            assert!(tried[0].error.to_string().contains("libucp.so.0"), "{}", tried[0]);
            let wheel = given("HOME").join("lib/python3.12/site-packages/libucx/lib");
            assert_eq!((tried[1].origin, &tried[1].place), (Origin::Wheel, &Place::Directory(wheel)));
            assert!(matches!(tried[1].error, OpenError::NoLibrary));
            assert!(tried.iter().any(|attempt| attempt.place == Place::Directory("/opt/hpcx/ucx/lib".into())));
        },
    );
}

#[test]
fn a_wheel_is_used_when_the_loader_has_nothing_and_its_transports_are_found() {
    let home = tempfile::tempdir().unwrap();
    isolated(
        "a_wheel_is_used_when_the_loader_has_nothing_and_its_transports_are_found",
        |command| {
            let package = home.path().join("lib/python3.12/site-packages/libucx");
            fs::create_dir_all(&package).unwrap();
            symlink(real_directory(), package.join("lib")).unwrap();
            fs::write(home.path().join("libucp.so.0"), "not a library").unwrap();
            command.env_remove(DIRECTORY_VARIABLE).env("REAL", real_directory());
            command.env("LD_LIBRARY_PATH", home.path()).env("VIRTUAL_ENV", home.path());
        },
        || {
            let ucx = load().unwrap();
            assert_eq!(ucx.origin(), Origin::Wheel);
            assert_eq!(ucx.path().parent().unwrap(), given("REAL"));
            initialise(ucx);
            let modules = given("REAL").join("ucx/libuct_cma.so");
            assert_eq!(mapped_files(modules.to_str().unwrap()).len(), 1, "{:?}", mapped_files("libuc"));
            for library in ["libucm.so", "libucs.so", "libuct.so", "libucp.so"] {
                assert_eq!(mapped_files(library), mapped_files(given("REAL").join(library).to_str().unwrap()));
            }
        },
    );
}

#[test]
fn a_mapped_libucp_is_reused() {
    let elsewhere = tempfile::tempdir().unwrap();
    isolated(
        "a_mapped_libucp_is_reused",
        |command| {
            command.env(DIRECTORY_VARIABLE, elsewhere.path()).env("REAL", load().unwrap().path());
        },
        || {
            // SAFETY: runs UCX's constructors, in a process that does nothing else yet.
            let library = unsafe { libloading::Library::new(given("REAL")) }.unwrap();
            let before = mapped_files("libucp");
            let ucx = load().unwrap();
            assert_eq!((ucx.origin(), ucx.path()), (Origin::AlreadyMapped, &*given("REAL")));
            assert_eq!(ucx.overridden_directory(), Some(&*given(DIRECTORY_VARIABLE)));
            assert_eq!(mapped_files("libucp"), before);
            initialise(ucx);
            // Its owner may close it: the table holds it open.
            library.close().unwrap();
            initialise(ucx);
        },
    );
}

#[test]
fn an_old_library_is_refused_and_not_followed_by_another() {
    let fake = tempfile::tempdir().unwrap();
    isolated(
        "an_old_library_is_refused_and_not_followed_by_another",
        |command| {
            build_fake(fake.path(), &required_functions());
            command.env(DIRECTORY_VARIABLE, fake.path());
        },
        || {
            for _ in 0..2 {
                match load() {
                    Err(LoadError::TooOld { version, path }) => {
                        assert_eq!(version, Version::new(1, 12, 1));
                        assert_eq!(path, given(DIRECTORY_VARIABLE).join("libucp.so.0"));
                    }
                    other => panic!("{other:?}"),
                }
            }
        },
    );
}

#[test]
fn a_library_that_lacks_a_function_is_refused_by_its_name() {
    let fake = tempfile::tempdir().unwrap();
    isolated(
        "a_library_that_lacks_a_function_is_refused_by_its_name",
        |command| {
            let functions: Vec<_> = required_functions().into_iter().filter(|name| *name != "ucp_put_nbx").collect();
            build_fake(fake.path(), &functions);
            command.env(DIRECTORY_VARIABLE, fake.path());
        },
        || match load() {
            Err(LoadError::MissingFunction { function, place }) => {
                assert_eq!(function, "ucp_put_nbx");
                assert_eq!(place, Place::Directory(given(DIRECTORY_VARIABLE)));
            }
            other => panic!("{other:?}"),
        },
    );
}
