//! Finds the CBLAS to link. `UMBRA_BLAS=<pkg-config name>` picks another one (`mkl-sdl-lp64`, `blis`, `cblas` ...).

fn main() {
    println!("cargo:rerun-if-env-changed=UMBRA_BLAS");
    let name = std::env::var("UMBRA_BLAS").unwrap_or_else(|_| "openblas".to_owned());
    if let Err(e) = pkg_config::Config::new().probe(&name) {
        println!("cargo:warning=looking for the BLAS `{name}` with pkg-config: {e}");
        panic!(
            "no BLAS called `{name}` is known to pkg-config. On Debian: apt-get install libopenblas-dev pkg-config \
             (or `make build`, which does it); for another CBLAS set UMBRA_BLAS to its pkg-config name"
        );
    }
}
