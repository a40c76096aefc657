// What cuMemCreate, cuMemMap and cuMemSetAccess of 1 GiB take in a fresh reservation, in eight settings, in turns:
// nvcc -O2 -o driver_alone driver_alone.cu -lcuda && ./driver_alone
#include <cuda.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>
#include <vector>
#include <algorithm>
static double now(){timespec t;clock_gettime(CLOCK_MONOTONIC,&t);return t.tv_sec*1e6+t.tv_nsec/1e3;}
#define C(x) do{CUresult r=(x);if(r){printf("%s %d\n",#x,r);return 1;}}while(0)
const size_t G=1ull<<30,M=1ull<<20;
int main(){
 C(cuInit(0)); CUdevice d; C(cuDeviceGet(&d,0)); CUcontext c; C(cuDevicePrimaryCtxRetain(&c,d)); C(cuCtxSetCurrent(c));
 CUmemAllocationProp p={}; p.type=CU_MEM_ALLOCATION_TYPE_PINNED; p.location.type=CU_MEM_LOCATION_TYPE_DEVICE; p.location.id=0;
 CUmemAccessDesc a={}; a.location=p.location; a.flags=CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
 const char*names[]={"plain","sleep 1ms","sleep 5ms","sleep 30ms","pretouch 2MiB","keep a 2MiB","pretouch+sleep 5ms","pretouch 1GiB kept cached(create,release)"};
 std::vector<double> tot[8],cr[8],ac[8],rel[8];
 for(int k=0;k<12;k++) for(int kind=0;kind<8;kind++){ for(int twice=0;twice<2;twice++){
   size_t R=560*G; CUdeviceptr b; C(cuMemAddressReserve(&b,R,0,0,0));
   CUmemGenericAllocationHandle s=0,h; CUdeviceptr at=b+16*G;
   if(kind==4||kind==6){ C(cuMemCreate(&s,2*M,&p,0)); C(cuMemMap(at,2*M,0,s,0)); C(cuMemSetAccess(at,2*M,&a,1)); C(cuMemUnmap(at,2*M)); C(cuMemRelease(s)); s=0;}
   if(kind==5) C(cuMemCreate(&s,2*M,&p,0));
   if(kind==7){C(cuMemCreate(&h,G,&p,0)); C(cuMemRelease(h));}
   C(cuCtxSynchronize());
   usleep(kind==1?1000:(kind==2||kind==6)?5000:kind==3?30000:0);
   double t2=now(); C(cuMemCreate(&h,G,&p,0)); double t3=now(); C(cuMemMap(at,G,0,h,0)); double t4=now(); C(cuMemSetAccess(at,G,&a,1)); double t5=now();
   if(twice){tot[kind].push_back(t5-t2); cr[kind].push_back(t3-t2); ac[kind].push_back(t5-t4);}
   double t6=now(); C(cuMemUnmap(at,G)); C(cuMemRelease(h)); double t7=now(); if(twice)rel[kind].push_back(t7-t6); if(s) C(cuMemRelease(s)); C(cuMemAddressFree(b,R));
 }}
 for(int kind=0;kind<8;kind++){ printf("%-32s total:",names[kind]); for(double x:tot[kind])printf(" %.0f",x); auto m=[&](std::vector<double>&v){std::sort(v.begin(),v.end());return v[v.size()/2];}; printf("  median %.0f create %.0f (max %.0f) access %.0f (max %.0f) unmap+release %.0f\n",m(tot[kind]),m(cr[kind]),cr[kind].back(),m(ac[kind]),ac[kind].back(),m(rel[kind])); }
}
